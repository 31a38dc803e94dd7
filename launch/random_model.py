"""Makes a small model directory with random weights, and a tokenizer trained on your data.

    python -m launch.random_model --text=data/gsm8k.jsonl --output=runs/models/gsm8k_tiny

The model solves nothing. It is meant for trying a data set, a template or a verifier before a real
model is downloaded. The tokenizer is trained on every string in the rows of the given files.
Exit codes: 0 done, 2 wrong setting.
"""

import pathlib
from collections.abc import Iterator
from typing import Any

from absl import flags

from launch import cli
from semrl_jax.support import compilation
from semrl_jax.support.errors import UserError

TEXT = flags.DEFINE_multi_string("text", [], ".jsonl or .parquet file to train the tokenizer on")
FAMILY = flags.DEFINE_string("family", "qwen2", "architecture, as config.model.family")
OUTPUT = flags.DEFINE_string("output", None, "directory to make")
VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 1024, "tokens, including bytes and special tokens")
HIDDEN_SIZE = flags.DEFINE_integer("hidden_size", 64, "width")
INTERMEDIATE_SIZE = flags.DEFINE_integer("intermediate_size", 128, "feed-forward width")
NUM_LAYERS = flags.DEFINE_integer("num_layers", 2, "layers")
NUM_HEADS = flags.DEFINE_integer("num_heads", 2, "query heads")
NUM_KV_HEADS = flags.DEFINE_integer("num_kv_heads", 1, "key-value heads")
CONTEXT = flags.DEFINE_integer("context", 4096, "tokens of prompt and response")
SEED = flags.DEFINE_integer(
    "seed", 0, "random seed of the weights", lower_bound=0, upper_bound=2**32 - 1
)


def main() -> int:
    output = pathlib.Path(cli.required(OUTPUT))
    if not TEXT.value:
        raise UserError("--text is needed: a .jsonl file to train the tokenizer on.")
    if NUM_HEADS.value < 1 or HIDDEN_SIZE.value % NUM_HEADS.value:
        raise UserError(
            f"--num_heads={NUM_HEADS.value} must divide --hidden_size={HIDDEN_SIZE.value}."
        )
    with cli.new_directory("output", output) as output:
        make(output)
    return 0


def make(output: pathlib.Path) -> None:
    import jax

    from semrl_jax import data, models

    compilation.keep_programs()
    texts = []
    for file in TEXT.value:
        for where, row in data.read_rows(pathlib.Path(file)):
            if isinstance(row, data.RowError):
                raise UserError(f"{where}: {row}")
            texts += strings(row)
    if not texts:
        raise UserError(f"--text={','.join(TEXT.value)} has no text to train the tokenizer on.")
    tokenizer = data.train_tokenizer(texts, VOCAB_SIZE.value)
    sizes = (HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS)
    config = models.random_config(
        FAMILY.value,
        vocab_size=len(tokenizer),
        **{flag.name: flag.value for flag in sizes},
        head_dim=HIDDEN_SIZE.value // NUM_HEADS.value,
        max_position_embeddings=CONTEXT.value,
        tie_embeddings=True,
    )
    params = models.Policy(config).init(jax.random.key(SEED.value))
    models.save_directory(output, params, config, tokenizer)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"done: {output} has {count / 1e6:.2f} M parameters and {len(tokenizer)} tokens")


def strings(value: Any) -> Iterator[str]:
    """The strings in a JSON value, at any depth, without the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


if __name__ == "__main__":
    cli.run(main, __doc__)
