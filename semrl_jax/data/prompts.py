"""Prompt datasets, and the order in which training reads them.

The order is a pure function of (seed, epoch) and the position two integers, so the train state
holds all there is to resume from, whatever the number of processes or prompts a step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

from semrl_jax.data import arithmetic
from semrl_jax.data.templates import apply_template
from semrl_jax.data.tokenizer import Tokenizer
from semrl_jax.errors import UserError

_ORDER = 0x0DE4  # last in its seed: apart from every stream of two numbers

Position = tuple[int, int]  # (epoch, prompts consumed of it); a dataset starts at (0, 0)


@dataclasses.dataclass(frozen=True, eq=False)
class PromptExample:
    """One prompt.

    Attributes:
      prompt: the text, template included.
      prompt_ids: int32 token ids of that text.
      answer: the reference answer, for the verifier.
      data_source: where it came from; statistics are kept apart by it.
      index: its row there, counted from 0 before any was left out.
    """

    prompt: str
    prompt_ids: Int[np.ndarray, " P"]
    answer: str
    data_source: str
    index: int


@dataclasses.dataclass(frozen=True, eq=False)
class PromptDataset:
    """Prompts in file order, and how many were left out for their length."""

    examples: tuple[PromptExample, ...]
    num_too_long: int = 0

    def __len__(self) -> int:
        return len(self.examples)


def prompt_order(size: int, seed: int, epoch: int) -> Int[np.ndarray, " size"]:
    """The order of an epoch: a permutation of 0..size-1, the same on every machine."""
    return np.random.default_rng((seed, epoch, _ORDER)).permutation(size)


def next_prompts(
    dataset: PromptDataset, seed: int, position: Position, count: int
) -> tuple[list[PromptExample], Position]:
    """Reads on from a position, into the next epochs if need be.

    Args:
      dataset: not empty.
      seed: not negative.
      position: (epoch, cursor), 0 <= cursor <= size.
      count: prompts to read; may exceed the dataset.

    Returns:
      The prompts and the position after them. Reading in two calls gives what one call gives.

    Raises:
      ValueError: if the dataset is empty, or the position lies outside of it.
    """
    epoch, cursor = position
    size = len(dataset)
    if not size:
        raise ValueError("the dataset is empty.")
    if epoch < 0 or not 0 <= cursor <= size or count < 0:
        raise ValueError(
            f"position {position} or count {count} does not fit a dataset of {size} prompts; is it "
            "another dataset than the one the run began with?"
        )
    prompts: list[PromptExample] = []
    while True:
        if cursor == size:
            epoch, cursor = epoch + 1, 0
        take = min(count - len(prompts), size - cursor)
        if not take:
            return prompts, (epoch, cursor)
        order = prompt_order(size, seed, epoch)[cursor : cursor + take]
        prompts += [dataset.examples[i] for i in order]
        cursor += take


def build_dataset(
    rows: Iterable[tuple[str, str]],
    tokenizer: Tokenizer,
    *,
    data_source: str,
    max_prompt_tokens: int,
    add_special_tokens: bool = False,
) -> PromptDataset:
    """Tokenises (prompt, answer) pairs and leaves out prompts above the limit.

    Args:
      rows: prompt texts with template, and reference answers.
      tokenizer: see `tokenizer.load_tokenizer`.
      data_source: stored with every example.
      max_prompt_tokens: the limit, in tokens.
      add_special_tokens: whether the tokenizer adds what it adds by default, such as a
        beginning-of-sequence token; training and evaluation must agree.

    Raises:
      UserError: if no prompt is left.
    """
    rows = list(rows)
    texts = [prompt for prompt, _ in rows]
    all_ids = tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"] if texts else []
    examples = tuple(
        PromptExample(prompt, np.array(ids, np.int32), answer, data_source, i)
        for i, ((prompt, answer), ids) in enumerate(zip(rows, all_ids, strict=True))
        if 0 < len(ids) <= max_prompt_tokens
    )
    num_empty = sum(not ids for ids in all_ids)
    if num_empty:
        raise UserError(f"data source {data_source!r}: {num_empty} prompts have no token.")
    if not examples:
        raise UserError(
            f"data source {data_source!r}: none of its {len(rows)} prompts has at most "
            f"data.max_prompt_tokens={max_prompt_tokens} tokens."
        )
    return PromptDataset(examples, len(rows) - len(examples))


def arithmetic_prompts(tokenizer: Tokenizer, seed: int, size: int) -> PromptDataset:
    """Training prompts of the quickstart task."""
    return _arithmetic_dataset(tokenizer, arithmetic.training_problems(seed, size))


def arithmetic_held_out_prompts(
    tokenizer: Tokenizer, size: int = arithmetic.NUM_HELD_OUT
) -> PromptDataset:
    """The first `size` of the 512 test prompts of the quickstart task; training has none."""
    return _arithmetic_dataset(tokenizer, arithmetic.held_out_problems()[:size])


def load_prompts(
    path: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    question_field: str = "question",
    answer_field: str = "answer",
    template: str = "plain",
    max_prompt_tokens: int = 512,
    add_special_tokens: bool = False,
    data_source: str = "",
) -> PromptDataset:
    """Loads a JSON Lines (.jsonl) or Parquet (.parquet) file.

    Args:
      path: the file.
      tokenizer: see `tokenizer.load_tokenizer`.
      question_field, answer_field: a key, or a path into nested rows such as
        "reward_model.ground_truth" or "prompt.0.content". The question is text, the answer text or
        a finite number.
      template: see `templates.apply_template`.
      max_prompt_tokens: longer prompts are left out and counted.
      add_special_tokens: see `build_dataset`.
      data_source: name to store; the file's name without ending if empty.

    Raises:
      UserError: if the file is missing, unreadable or holds a bad row; the message names the file,
        the line (counted from 1) and the field.
    """
    path = pathlib.Path(path)
    rows = []
    for where, row in _read_rows(path):
        question = _field(row, question_field, where)
        if not isinstance(question, str) or not question.strip():
            raise UserError(
                f"{where}: field {question_field!r} must be text, not {question!r:.80}."
            )
        answer = _answer_text(_field(row, answer_field, where))
        if answer is None:
            raise UserError(
                f"{where}: field {answer_field!r} must be text or a finite number, not "
                f"{_field(row, answer_field, where)!r:.80}."
            )
        rows.append((apply_template(template, question), answer))
    if not rows:
        raise UserError(f"{path}: the file has no rows.")
    return build_dataset(
        rows,
        tokenizer,
        data_source=data_source or path.stem,
        max_prompt_tokens=max_prompt_tokens,
        add_special_tokens=add_special_tokens,
    )


def _arithmetic_dataset(tokenizer: Tokenizer, problems: list[arithmetic.Problem]) -> PromptDataset:
    return build_dataset(
        [(arithmetic.prompt_text(p), arithmetic.reference_answer(p)) for p in problems],
        tokenizer,
        data_source="arithmetic",
        max_prompt_tokens=arithmetic.MAX_PROMPT_TOKENS,
    )


def _read_rows(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows, each with the words that say where it stands."""
    if not path.is_file():
        raise UserError(f"prompt file {str(path)!r} does not exist.")
    if path.suffix == ".jsonl":
        return _read_json_lines(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise UserError(f"prompt file {str(path)!r} must end in .jsonl or .parquet.")


def _read_json_lines(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:  # bad UTF-8 is a ValueError too
                raise UserError(f"{where}: not valid JSON ({e}).") from e
            if not isinstance(row, dict):
                raise UserError(f"{where}: must be a JSON object, not {type(row).__name__}.")
            yield where, row


def _read_parquet(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError) as e:
        reason = " ".join(str(e).split())
        raise UserError(f"{path}: not a readable Parquet file ({reason}).") from e


def _field(row: dict[str, Any], field: str, where: str) -> Any:
    if field in row:
        return row[field]
    value: Any = row
    for key in field.split("."):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            raise UserError(f"{where}: field {field!r} is missing; the row has {sorted(row)}.")
    return value


def _answer_text(value: Any) -> str | None:
    """27.0 reads 27: tables of numbers turn whole answers into floats."""
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return str(int(value)) if value == int(value) else repr(value)
