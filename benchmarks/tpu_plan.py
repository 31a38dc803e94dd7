"""The update of Qwen2.5-7B on TPU slices: what it sends, and its predicted MFU. Nothing runs.

    python -m benchmarks.tpu_plan --directory=build/plans
    python -m benchmarks.tpu_plan --directory=build/plans --before=build/plans_of_another_revision

Compiles the update for each of `CASES`, which takes minutes of a core each, and keeps the plans in
the directory: a plan that is there is not made again. `--before` has plans of an earlier revision.
"""

import argparse
import functools
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
        """Name of the file with its plan."""
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


def config_of(num_chips: int, case: Case):
    """One sequence per row, without a reference: 6 N per token, and attention."""
    from configs import default

    config = default.get_config()
    config.model.path, config.model.compute_dtype = MODEL, "bfloat16"
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


def planned(case: Case, directory: pathlib.Path) -> dict:
    """The plan of a case: from the directory, or made now."""
    file = directory / f"{case.name}.json"
    if not file.exists():
        from semrl_jax.planning import plan

        config = config_of(plan.find_slice(case.topology).num_chips, case)
        say = functools.partial(print, case.name, file=sys.stderr, flush=True)
        found = plan.make_plan(config, *plan.check(config, case.topology), say, ("update",))
        directory.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    return json.loads(file.read_text())


def row(name: str, case: Case, plan: dict) -> list[str]:
    """One line of the table of slices."""
    update = plan["programs"]["update"]
    sent = dict.fromkeys(("all-gather", "all-reduce", "reduce-scatter"), 0.0)
    for one in update["collectives"]:
        sent[one["kind"]] = sent.get(one["kind"], 0.0) + one["sent_bytes"] / 2**30
    times = update["times_s"]
    return [
        case.topology,
        f"{case.replica} x {case.fsdp} x {case.tensor}",
        f"{case.remat}{name}",
        *(f"{sent[kind]:.1f}" for kind in ("all-gather", "all-reduce", "reduce-scatter")),
        f"{plan['peak_bytes'] / 2**30:.1f} of {plan['hbm_bytes'] / 2**30:.1f}",
        f"{update['flops'] / 1e12:.0f}",
        f"{times['chip']:.2f}",
        f"{times['ici_async'] + times['ici_sync']:.2f}",
        f"{times['total']:.2f}",
        f"{update['mfu']:.1%}",
        update["bound"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("build/plans"))
    parser.add_argument("--before", type=pathlib.Path, help="plans of an earlier revision")
    results.add_option(parser)
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        if arguments.before is not None and (arguments.before / f"{case.name}.json").exists():
            rows.append(row(", before", case, planned(case, arguments.before)))
        rows.append(row("", case, planned(case, arguments.directory)))
    header = ("slice", "replica x fsdp x tensor", "remat", "gathered, GiB", "summed", "scattered",
              "HBM, GiB", "TFLOP", "chip, s", "ICI, s", "total, s", "MFU", "bound")  # fmt: skip
    tokens = ROWS * (PROMPT + RESPONSE)
    text = f"""
Predictions, not measurements: no TPU was used. {MODEL} in bfloat16 with float32 state, {MICRO}
micro-batches of {ROWS} sequences of {PROMPT} + {RESPONSE} tokens per chip ({tokens} tokens), no
reference. All figures are per chip and optimiser step. *Chip* is the roofline of all instructions,
*ICI* the time of the collectives. *Total* adds both where the schedule does not overlap them.

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
