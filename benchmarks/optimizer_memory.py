"""Bytes per parameter and per token of an update, by optimiser and dtype of the parameters.

    python -m benchmarks.optimizer_memory
    python -m benchmarks.optimizer_memory --topology=v5e:2x2

The first command takes a model of 61 M parameters, in float32 products, with `remat=dots` and rows
of one sequence of 128 tokens. It shows bytes per parameter of the optimiser's state, with masters,
and b of the estimate (`semrl_jax.training.update_memory`). For 1 and 4 rows it shows the peak of
the compiled update per parameter, activations included, next to the estimate.

The second command needs libtpu and no TPU. It compiles the update of a model as wide as
Qwen2.5-0.5B, of 4 layers, in bfloat16 products, with `remat=full`, and prints bytes of one chip.
"""

import launch  # noqa: F401 - first: one BLAS thread, as for every command

# isort: split

import argparse

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import machine
from benchmarks.memory import LONGEST, RESPONSE_TOKENS, measured_bytes, skewed_batch
from configs.default import get_config
from semrl_jax import models
from semrl_jax.algorithms import grpo
from semrl_jax.algorithms.algorithm import Algorithm
from semrl_jax.models.sharding import DATA_AXES
from semrl_jax.training.optimizer import Optimizer, load_direction, make_optimizer
from semrl_jax.training.packing import RowPlan, TokenRows
from semrl_jax.training.policy_update import PolicyLoss, SlotValues
from semrl_jax.training.train_state import abstract_trained
from semrl_jax.training.trainee import update_rows
from semrl_jax.training.update_memory import PerParameter, update_parts

MODEL = models.DecoderConfig(
    vocab_size=8192, hidden_size=640, intermediate_size=1792, num_layers=12, num_heads=10,
    num_kv_heads=5, head_dim=64,
)  # fmt: skip
WIDE = models.DecoderConfig(
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_layers=4, num_heads=14,
    num_kv_heads=2, head_dim=64,
)  # fmt: skip
MIB = 2**20
BFLOAT16 = {"first_moment_dtype": "bfloat16"}
OPTIMIZERS = {
    "adamw": {},
    "adamw, bfloat16 mean": BFLOAT16,
    "adafactor": {"name": "adafactor"},
    "adafactor, bfloat16 momentum": {"name": "adafactor", "momentum": 0.9, **BFLOAT16},
}


def make(name: str, param_dtype: str, is_offloaded: bool = False) -> Optimizer:
    """The optimiser of a line of a table."""
    config = get_config()
    config.optimizer.update(OPTIMIZERS[name])
    return make_optimizer(
        learning_rate=1e-6, learning_rate_warmup_steps=0, weight_decay=0.01, max_grad_norm=1.0,
        direction=load_direction(config, "training"), param_dtype=param_dtype,
        is_offloaded=is_offloaded,
    )  # fmt: skip


def measure(name: str, param_dtype: str) -> list[float]:
    """A line of the first table, in bytes per parameter."""
    mesh = models.make_mesh(dict.fromkeys(models.AXES, 1), jax.devices()[:1])
    policy, optimizer = models.Policy(MODEL, remat="dots", mesh=mesh), make(name, param_dtype)
    per = PerParameter.of(optimizer, policy.shapes())
    batch = skewed_batch(4, MODEL.vocab_size)
    found = [per.state, per.in_update]
    for num_rows in (1, 4):
        plan = RowPlan(mesh, micro_batch_size=num_rows)
        memory, layout, num_params = measured_bytes(policy, optimizer, plan, batch)
        peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        _, rows, columns = layout.rows.token_ids.shape
        parts = update_parts(
            MODEL, "dots", num_rows=rows, num_columns=columns,
            num_slots=rows * layout.rows.sources.shape[2], platform="cpu",
        )  # fmt: skip
        found += [peak / num_params, per.in_update + sum(parts.values()) / num_params]
    return found


def compiled_for(topology: str, config: models.DecoderConfig, optimizer: Optimizer):
    """The memory analysis of an update on one chip of a TPU slice."""
    from jax.experimental import topologies

    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = models.make_mesh(dict.fromkeys(models.AXES, 1), chips[:1])
    policy = models.Policy(config, "bfloat16", "full", mesh)
    inputs = abstract_trained(policy.shapes(), optimizer, mesh), *_rows(mesh, 4)
    (params, state), rows, values = inputs
    return update_rows.trace(
        params, state, (rows, values), jax.ShapeDtypeStruct((), jnp.int32),
        loss=PolicyLoss(policy, 1.0, Algorithm(grpo, grpo.Options(kl_coefficient=0.0))),
        optimizer=optimizer, prefix="policy",
    ).lower(lowering_platforms=("tpu",)).compile().memory_analysis()  # fmt: skip


def _rows(mesh: Mesh, num_rows: int) -> tuple[TokenRows, SlotValues]:
    """Shapes of two micro-batches."""
    split = NamedSharding(mesh, PartitionSpec(None, DATA_AXES))

    def of(size, dtype=jnp.int32):
        return jax.ShapeDtypeStruct((2, num_rows, size), dtype, sharding=split)

    columns, slots, floats = of(LONGEST), of(RESPONSE_TOKENS), of(RESPONSE_TOKENS, jnp.float32)
    values = SlotValues(None, None, None, floats, floats)
    return TokenRows(*[columns] * 3, *[slots] * 3), values


def print_topology(topology: str) -> None:
    print("| optimiser | parameters | state on | chip, MiB | temporary, MiB | host, MiB |")
    print("|---|---|---|---|---|---|")
    for name, dtype in (("adamw", "float32"), ("adamw", "bfloat16"), ("adafactor", "bfloat16")):
        for is_offloaded in (False, True):
            found = compiled_for(topology, WIDE, make(name, dtype, is_offloaded))
            place = "host" if is_offloaded else "chip"
            sizes = (
                found.argument_size_in_bytes, found.temp_size_in_bytes,
                found.host_argument_size_in_bytes,
            )  # fmt: skip
            cells = " | ".join(f"{size / MIB:.0f}" for size in sizes)
            print(f"| `{name}` | {dtype} | {place} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="", help="TPU slice to compile for, such as v5e:2x2")
    options = parser.parse_args()
    if options.topology:
        print_topology(options.topology)
        return
    print(machine.description())
    print("| optimiser | parameters | state | b | 1 row | estimate | 4 rows | estimate |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        for name in OPTIMIZERS:
            cells = " | ".join(f"{number:.1f}" for number in measure(name, dtype))
            print(f"| {name} | {dtype} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
