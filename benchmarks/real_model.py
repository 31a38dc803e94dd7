"""What `benchmarks.step --model` gives the systems: prompts of a real model, and its end tokens."""

import json
import pathlib
import random
from typing import Any

from semrl_jax import data, models
from semrl_jax.data.templates import prompt_renderer

FIELDS = ("question", "problem")  # of a row, the first one that it has
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


def sums(count: int) -> list[str]:
    """Problems of different lengths, to which the responses have different lengths too."""
    draw = random.Random(0)
    terms = [draw.choices(range(10, 100), k=draw.randint(2, 5)) for _ in range(count)]
    return [f"What is {' + '.join(map(str, numbers))}? Explain each step." for numbers in terms]


def questions(file: pathlib.Path, count: int) -> list[str]:
    """The first problems of a JSONL file."""
    found = []
    with file.open(encoding="utf-8") as lines:
        for _, line in zip(range(count), lines):
            row = json.loads(line)
            found.append(next(row[field] for field in FIELDS if field in row))
    if len(found) < count:
        raise SystemExit(f"{file} has {len(found)} problems; {count} are needed.")
    return found


def work(directory: pathlib.Path, file: pathlib.Path | None, count: int) -> dict[str, Any]:
    """The part of the systems' work that depends on the model.

    Args:
      directory: in Hugging Face's format, with a chat template.
      file: of problems; None: `sums`.
      count: problems of a step.
    """
    tokenizer = data.load_tokenizer(directory)
    texts = sums(count)
    if file:  # as a run would ask them
        texts = [f"{question}\n{INSTRUCTION}" for question in questions(file, count)]
    prompts = prompt_renderer("chat", tokenizer)(texts)
    lengths = [len(ids) for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"]]
    return {
        "model": str(directory.absolute()),
        "prompts": prompts,
        "prompt_lengths": lengths,
        "end_token_ids": sorted({tokenizer.eos_token_id, *models.eos_token_ids(directory)}),
    }


def floor_flops(directory: str, lengths: list[int], num_responses: int) -> dict[str, float]:
    """Arithmetic of the matrix products of one forward pass: 2 per parameter and token.

    Each prompt counts once, the last token of a response needs no layer, and attention is left out.

    Returns:
      `fixed_flops` of a batch, and `token_flops` for each response token in addition.
    """
    config = models.load_config(directory)
    layers = 2.0 * config.num_layers * config.layer_products
    head = 2.0 * config.vocab_size * config.hidden_size
    fixed = layers * (sum(lengths) - num_responses)
    return {"fixed_flops": fixed, "token_flops": layers + head}
