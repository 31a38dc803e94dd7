"""Plans a run on a TPU slice or on GPUs without them: memory, collectives, predicted time.

    python -m launch.plan --config=configs/verl/grpo_qwen2_5_7b.py --topology=v5p-128
    python -m launch.plan --config=configs/gsm8k_qwen2_5_0_5b.py --topology=h100:1x8

For a slice, it compiles the programs of the run with the compiler of the slice, which takes minutes
for each: pip install -e '.[tpu]'. For GPUs, it estimates by formulas. It needs no device and no
weights. docs/plan.md explains the tables. Exit codes: 0 it fits, 1 it does not fit, 2 wrong setting
(one line names it).
"""

import json
import os
import sys
import threading
import time

from absl import flags
from ml_collections import config_flags

from launch import cli
from semrl_jax.support.errors import UserError

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "experiment file, such as configs/verl/grpo_qwen2_5_7b.py"
)
TOPOLOGY = flags.DEFINE_string(
    "topology", None, "slice, such as v5p-64 or v5p:2x4x4; or nodes x GPUs, such as h100:4x8"
)
ESTIMATE = flags.DEFINE_bool(
    "estimate", False, "estimate a slice by formulas, without its compiler"
)
REPLICA_NODES = flags.DEFINE_integer(
    "replica_nodes", 0, "GPU nodes that have vLLM replicas and do not train", 0
)
PROGRAMS = flags.DEFINE_list("programs", ["update", "pass", "decode"], "programs to compile")
JSON = flags.DEFINE_bool("json", False, "print one JSON object")

KNOWN = ("update", "pass", "decode")
ALIVE_S = 10.0  # between two lines of progress


def main() -> int:
    if TOPOLOGY.value is None:
        raise UserError("--topology is needed, such as --topology=v5p-64 or h100:4x8; see --help.")
    if "update" not in PROGRAMS.value or (bad := set(PROGRAMS.value) - set(KNOWN)):
        named = f" has {min(bad)!r}, and" if "update" in PROGRAMS.value else ""
        raise UserError(f"--programs{named} must name update, and may name pass and decode.")
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs; the slice is not here
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # it cannot read programs of a slice
    config = cli.checked_config(CONFIG)
    from semrl_jax.planning import estimate, report
    from semrl_jax.planning import plan as planning
    from semrl_jax.support.chips import Cluster

    where, architecture = planning.check(config, TOPOLOGY.value, compiles=not ESTIMATE.value)
    if ESTIMATE.value or REPLICA_NODES.value or isinstance(where, Cluster):
        plan = estimate.make_estimate(config, where, architecture, REPLICA_NODES.value)
    else:
        with _Progress() as progress:
            plan = planning.make_plan(config, where, architecture, progress, tuple(PROGRAMS.value))
    if JSON.value:
        print(json.dumps(plan))
    else:
        from rich.console import Console

        console = Console(width=100, highlight=False)
        for line in report.headline(plan):
            console.print(line, markup=False)
        tables = (report.memory_table, report.time_table, report.collective_table)
        for table in tables[: 2 if "trains_on" in plan else 3]:
            console.print(table(plan))
    return 0 if plan["fits"] else 1


class _Progress:
    """Says on stderr what is compiled, again every ten seconds: one program takes minutes."""

    def __enter__(self):
        self._what, self._since, self._done = "", time.monotonic(), threading.Event()
        threading.Thread(target=self._repeat, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._done.set()

    def __call__(self, what: str) -> None:
        self._what, self._since = what, time.monotonic()
        print(f"{what} ...", file=sys.stderr, flush=True)

    def _repeat(self) -> None:
        while not self._done.wait(ALIVE_S):
            seconds = time.monotonic() - self._since
            print(f"{self._what} ... {seconds:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    cli.run(main, __doc__)
