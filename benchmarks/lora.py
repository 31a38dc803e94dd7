"""The memory of an update of adapters, compared with an update of all parameters.

    python -m benchmarks.lora --rank 16

Bytes are read from compiled programs of Qwen2.5-0.5B's sizes in float32, one micro-batch of one row
of 256 tokens, with a KL penalty and remat=full. Nothing is executed and no weights exist. "held" is
what stays between updates: trained parameters, optimiser, frozen base or reference. "peak" adds
what the update needs.
"""

import launch  # noqa: F401 - first: one BLAS thread, as for every command

# isort: split

import argparse
import json

import jax
import numpy as np

from benchmarks import machine
from semrl_jax import models
from semrl_jax.algorithms import grpo
from semrl_jax.algorithms.algorithm import Algorithm
from semrl_jax.models import peft
from semrl_jax.runs.memory import num_parameters
from semrl_jax.training.optimizer import make_optimizer
from semrl_jax.training.packing import TokenRows
from semrl_jax.training.policy_update import PolicyLoss, SlotValues
from semrl_jax.training.trainee import Frozen, update_rows
from semrl_jax.training.update_memory import update_parts

ALGORITHM = Algorithm(grpo, grpo.Options(kl_coefficient=0.1))
COLUMNS = 256  # of a row; half of them are slots of response tokens


def architecture(num_layers: int) -> models.DecoderConfig:
    """Qwen2.5-0.5B with this number of layers; it has 24."""
    return models.DecoderConfig(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_layers=num_layers,
        num_heads=14, num_kv_heads=2, head_dim=64, tie_embeddings=True,
    )  # fmt: skip


def abstract(tree, dtype: str):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)


def measured(config: models.DecoderConfig, rank: int, dtype: str) -> dict[str, float]:
    """MiB of an update; rank 0 trains all parameters. The base or reference has type `dtype`."""
    policy = models.Policy(config, "float32", "full")
    optimizer = make_optimizer(
        learning_rate=1e-5, learning_rate_warmup_steps=0, adam_b1=0.9, adam_b2=0.999,
        weight_decay=0.01, max_grad_norm=1.0,
    )  # fmt: skip
    shapes, lora = policy.shapes(), None
    frozen = abstract(shapes, dtype)
    trained, reference, base = shapes, frozen, None
    if rank:
        lora = models.Lora(peft.find_modules(config, ["all-linear"]), rank, 2.0 * rank)
        trained, reference, base = lora.shapes(shapes), None, lora.base(frozen)
    opt_state = jax.eval_shape(optimizer.init, trained)

    def of(columns, dtype):
        return jax.ShapeDtypeStruct((1, 1, columns), dtype)

    fields = {name: of(COLUMNS, np.int32) for name in ("token_ids", "positions", "segment_ids")}
    slots = {name: of(COLUMNS // 2, np.int32) for name in TokenRows._fields if name not in fields}
    values = SlotValues(None, None, None, *[of(COLUMNS // 2, np.float32)] * 2)
    memory = (
        update_rows.lower(
            trained, opt_state, (TokenRows(**fields, **slots), values), np.int32(1),
            Frozen(base, reference), loss=PolicyLoss(policy, 1.0, ALGORITHM), optimizer=optimizer,
            prefix="policy",
        )
        .compile()
        .memory_analysis()
    )  # fmt: skip
    num_trained = sum(leaf.size for leaf in jax.tree.leaves(trained))
    parts = update_parts(
        config, "full", num_rows=1, num_columns=COLUMNS, num_slots=COLUMNS // 2, platform="cpu"
    )
    expected = 20 * num_trained + sum(parts.values())
    expected += num_parameters(config) * np.dtype(jax.numpy.dtype(dtype)).itemsize
    mib = {
        "trained": 4 * num_trained,
        "optimiser": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(opt_state)),
        "held": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "peak": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "predicted": expected,
    }
    return {name: round(float(size) / 2**20, 1) for name, size in mib.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    print(machine.description())
    config = architecture(options.layers)
    print(f"{num_parameters(config) / 1e6:.1f} M parameters; MiB")
    for rank, dtype in ((0, "float32"), (0, "bfloat16"), (options.rank, "float32"),
                        (options.rank, "bfloat16")):  # fmt: skip
        print(json.dumps({"rank": rank, "frozen": dtype} | measured(config, rank, dtype)))


if __name__ == "__main__":
    main()
