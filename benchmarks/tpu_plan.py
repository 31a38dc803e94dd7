"""The update of Qwen2.5-7B on TPU slices: what it sends, and its predicted MFU. Nothing runs.

    python -m benchmarks.tpu_plan --directory=build/plans
    python -m benchmarks.tpu_plan --directory=build/plans --before=build/plans_of_another_revision

Compiles the update for each of `CASES`, which takes minutes of a core each, and keeps what the
compiler gave in the directory: a program that is there is not compiled again. `--before` has the
programs that an earlier revision of this package gave.
"""

import argparse
import gzip
import itertools
import json
import pathlib
import sys
from typing import NamedTuple

from benchmarks import results


class Case(NamedTuple):
    """A slice, a mesh on it, and what the backward pass computes again."""

    topology: str
    replica: int
    fsdp: int
    tensor: int
    remat: str

    @property
    def name(self) -> str:
        """Name of the file with its program."""
        mesh = f"{self.replica}x{self.fsdp}x{self.tensor}"
        return f"{self.topology.replace(':', '_')}_{mesh}_{self.remat}"


MODEL = "Qwen/Qwen2.5-7B"
CASES = (
    Case("v5p:4x4x4", 1, 64, 1, "full"),
    Case("v5p:4x4x4", 2, 32, 1, "dots"),
    Case("v5e:8x8", 1, 64, 1, "full"),
    Case("v5e:8x8", 1, 32, 2, "full"),
)
ROWS, PROMPT, RESPONSE, MICRO = 4, 256, 768, 4  # per chip; tokens; micro-batches


def config_of(num_chips: int, case: Case | None = None):
    """One sequence per row, without a reference: 6 N per token, and attention."""
    from configs import default

    config = default.get_config()
    config.model.path, config.model.compute_dtype, config.model.remat = MODEL, "bfloat16", "full"
    if case is not None:
        config.model.remat = case.remat
        for axis in ("replica", "fsdp", "tensor"):
            config.mesh[axis] = getattr(case, axis)
    config.algorithms.loss.kl_coefficient = 0.0
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = PROMPT, RESPONSE
    config.rollout.group_size = 16
    prompts = num_chips * ROWS * MICRO // 16
    config.data.prompts_per_step = config.training.prompts_per_minibatch = prompts
    config.training.micro_batch_size = num_chips * ROWS
    return config


def compiled(case: Case, directory: pathlib.Path) -> dict:
    """What the compiler gave for a case: from the directory, or compiled now."""
    file = directory / f"{case.name}.json.gz"
    if not file.exists():
        from semrl_jax.planning import plan, programs

        config = config_of(plan.find_slice(case.topology).num_chips, case)
        where, architecture = plan.check(config, case.topology)
        print(f"compiling {case.name} ...", file=sys.stderr, flush=True)
        mesh = programs.trainer_mesh(config, where)
        found = programs.Programs(config, architecture, where, mesh).update()
        directory.mkdir(parents=True, exist_ok=True)
        kept = {"text": found.text, "temporary": found.temporary, "total": found.total}
        file.write_bytes(gzip.compress(json.dumps(kept).encode()))
    return json.loads(gzip.decompress(file.read_bytes()))


def needed_flops() -> float:
    """Operations of a chip: 6 N per token and attention, by the closed form."""
    from semrl_jax.planning import roofline
    from semrl_jax.planning.architectures import find_architecture

    rows = ROWS * MICRO
    return roofline.products(
        find_architecture(MODEL),
        num_tokens=rows * (PROMPT + RESPONSE),
        num_columns=PROMPT + RESPONSE,
        num_slots=rows * RESPONSE,
    ).training


def places_of(where) -> list:
    """Coordinates of the chips in the order of the devices, hosts of 2 x 2 first."""
    hosts = itertools.product(*(range(-(-size // 2)) for size in reversed(where.shape[:2])))
    planes = range(where.shape[2]) if len(where.shape) == 3 else (0,)
    hosts = list(hosts)
    return [
        (2 * x + dx, 2 * y + dy, z)
        for z in planes
        for y, x in hosts
        for dy in range(min(2, where.shape[1]))
        for dx in range(min(2, where.shape[0]))
    ]


def mesh_of(case: Case) -> dict[str, int]:
    return {"replica": case.replica, "fsdp": case.fsdp, "sequence": 1, "tensor": case.tensor}


def row(name: str, case: Case, kept: dict) -> list[str]:
    """One line of the table of slices."""
    from semrl_jax.planning import hlo, roofline
    from semrl_jax.planning.chips import find_slice

    where, mesh = find_slice(case.topology), mesh_of(case)
    program = hlo.read(kept["text"], passes=MICRO)
    times = roofline.times(program, where, places_of(where))
    sent = dict.fromkeys(hlo.COLLECTIVES, 0.0)
    for (kind, _), (_, num_bytes) in hlo.by_kind_and_axis(program.collectives, mesh).items():
        sent[kind] += num_bytes / 2**30
    mfu = needed_flops() / times.total / where.chip.flops
    return [
        case.topology,
        f"{case.replica} x {case.fsdp} x {case.tensor}",
        f"{case.remat}{name}",
        *(f"{sent[kind]:.1f}" for kind in ("all-gather", "all-reduce", "reduce-scatter")),
        f"{kept['total'] / 2**30:.1f} of {where.chip.hbm_bytes / 2**30:.1f}",
        f"{program.dot_flops / 1e12:.0f}",
        *(f"{value:.2f}" for value in (times.chip, times.ici, times.total)),
        f"{mfu:.1%}",
        times.bound,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("build/plans"))
    parser.add_argument("--before", type=pathlib.Path, help="programs of an earlier revision")
    results.add_option(parser)
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        if arguments.before is not None and (arguments.before / f"{case.name}.json.gz").exists():
            rows.append(row(", before", case, compiled(case, arguments.before)))
        rows.append(row("", case, compiled(case, arguments.directory)))
    header = ("slice", "replica x fsdp x tensor", "remat", "gathered, GiB", "summed", "scattered",
              "HBM, GiB", "TFLOP", "chip, s", "ICI, s", "total, s", "MFU", "bound")  # fmt: skip
    tokens = ROWS * (PROMPT + RESPONSE)
    text = f"""
Predictions, not measurements: no TPU was used. {MODEL} in bfloat16 with float32 state, {MICRO}
micro-batches of {ROWS} sequences of {PROMPT} + {RESPONSE} tokens per chip ({tokens} tokens), no
reference. All figures are per chip and optimiser step. *Chip* is the roofline of all instructions,
*ICI* that of the collectives. *Total* adds both where the schedule does not overlap them.

{results.table(header, rows)}

- *Before* is the program without the gathers and the scattered gradients that `models/sharding.py`
  writes: the compiler alone chooses.
- A v5p chip has memory for the results of products (`remat=dots`), so it does not compute them
  again. A v5e chip has not.
- If `fsdp` is the whole slice, the compilers sum whole gradients over all chips, which sends twice
  the bytes of a scatter. With 64 shards, the 3584 / 64 = 56 rows of a part do not fill tiles of 16
  either, and the v5p compiler gathers by sums too. If `fsdp` is one axis of several and its parts
  fill tiles, every kernel is gathered, and every gradient scattered. What is then summed are
  gradients over replicas, and states over `tensor`.
"""
    results.show("TPU slices, planned", text, arguments.json)


if __name__ == "__main__":
    main()
