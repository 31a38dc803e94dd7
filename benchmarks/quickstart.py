"""Runs the quickstart from random weights on several seeds, and its control, and prints the costs.

    python -m benchmarks.quickstart --seeds 0 1 2 --control-seeds 0

The control permutes the rewards over the batch (rewards.shuffle): it must not learn. Runs follow
one another in separate processes, each with an empty cache of compiled programs. Times are wall
clock. CPU seconds count the process and its children.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import results

ACCURACY = "eval/arithmetic/greedy_accuracy"
STAGES = (
    "sync_weights", "sample", "generate", "old_logprobs", "ref_logprobs", "advantages", "update",
    "evaluate", "step",
)  # fmt: skip


def run(
    seed: int, shuffle: bool, extra: list[str], directory: pathlib.Path, config: str = "quickstart"
) -> dict[str, float]:
    """Runs a config once; returns accuracy before and after, gain, seconds, MiB and tokens/s."""
    workdir = directory / f"seed{seed}{'_shuffled' if shuffle else ''}"
    command = [
        sys.executable, "-m", "launch.train", f"--config=configs/{config}.py",
        f"--workdir={workdir}", f"--config.seed={seed}", f"--config.rewards.shuffle={shuffle}",
        *extra,
    ]  # fmt: skip
    environment = os.environ | {"XDG_CACHE_HOME": f"{workdir}_cache"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.monotonic() - started
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy/loss" in row]
    later = steps[2:] or steps

    def median(key: str) -> float:
        return statistics.median(row[key] for row in later if key in row)

    evaluated = [row for row in rows if "time/evaluate_s" in row]
    training_s = sum(row["time/step_s"] for row in rows)
    result = {
        "accuracy before": rows[0][ACCURACY],
        "accuracy after": rows[-1][ACCURACY],
        "gain": rows[-1][ACCURACY] - rows[0][ACCURACY],
        "wall s": wall_s,
        "CPU s": usage.ru_utime + usage.ru_stime,
        "start and warm start s": wall_s - training_s,
        "all steps s": training_s,
        "first step s": steps[0]["time/step_s"],
        "peak MiB": usage.ru_maxrss / 1024,
        "sampled tokens/s": median("rollout/tokens_per_s"),
        "trained tokens/s": median("policy/tokens_per_s"),
    }
    for stage in STAGES:
        source = evaluated[1:] if stage == "evaluate" else later
        if times := [row[f"time/{stage}_s"] for row in source if f"time/{stage}_s" in row]:
            result[f"{stage} s"] = statistics.median(times)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--control-seeds", type=int, nargs="*", default=[0])
    results.add_option(parser)
    parser.add_argument("--keep", help="directory for the runs; default: a temporary one")
    arguments, extra = parser.parse_known_args()
    directory = pathlib.Path(arguments.keep or tempfile.mkdtemp())
    plan = [(seed, False) for seed in arguments.seeds]
    plan += [(seed, True) for seed in arguments.control_seeds]
    names = [f"seed {seed}{' shuffled' if shuffle else ''}" for seed, shuffle in plan]
    found = []
    for name, (seed, shuffle) in zip(names, plan):
        print(f"{name} ...", file=sys.stderr, flush=True)
        found.append(run(seed, shuffle, extra, directory))
    if not arguments.keep:
        shutil.rmtree(directory)
    rows = [[key, *(f"{result[key]:.3f}" for result in found)] for key in found[0]]
    results.show("The quickstart", results.table(("", *names), rows), arguments.json)


if __name__ == "__main__":
    main()
