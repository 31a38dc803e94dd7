"""Compares algorithms on the task of the quickstart, on several seeds.

    python -m benchmarks.algorithms --output=runs/study
    python -m benchmarks.algorithms --output=runs/study --report

The first command trains every variant on every seed, one run after the other: all variants of a
seed, then the next seed. A finished run is not repeated, and an interrupted one continues. So the
same command continues the study, and --variants adds variants to it. One run takes about 160 CPU
seconds. The runs of a seed start from the same warm start, and every step of every variant trains
on 256 responses.

The second command writes docs/algorithm_study.md and its figure from the finished runs; see
`benchmarks.algorithm_report`.
"""

import argparse
import importlib
import os
import pathlib
import subprocess
import sys
import time
from typing import NamedTuple

from benchmarks import algorithm_report, machine
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import write_json

NUM_RESPONSES = 256  # per step, of every variant
PLAIN = {"shaping.target": "none", "hidden_states.source": "none"}
VERL = {"shaping.target": "advantage", "hidden_states.source": "rollout"}
GREEDY, ALL_SCORES = ("greedy",), ("greedy", "benchmarks.pass_at_k")
RESULT = algorithm_report.RESULT


class Variant(NamedTuple):
    """One row of the study: its title, its config file and the settings that differ from it."""

    title: str
    settings: dict[str, object]
    config: str = "quickstart"


VARIANTS = {
    "grpo": Variant("GRPO", PLAIN),
    "grpo_verl": Variant("GRPO + VERL", VERL),
    "ppo": Variant("PPO", PLAIN, "quickstart_ppo"),
    "ppo_verl": Variant("PPO + VERL", VERL, "quickstart_ppo"),
    "dr_grpo": Variant(
        "Dr. GRPO",
        PLAIN
        | {
            "algorithms.name": "dr_grpo",
            "algorithms.aggregation": "constant_length",
            "algorithms.constant_length": 56,  # rollout.max_response_tokens
        },
    ),
    "rloo": Variant("RLOO", PLAIN | {"algorithms.name": "rloo"}),
    "gspo": Variant(
        "GSPO",
        PLAIN
        | {
            "algorithms.loss.surrogate": "gspo",
            "algorithms.loss.clip_epsilon": 3e-4,
            "algorithms.loss.clip_epsilon_high": 4e-4,
            "algorithms.aggregation": "response_mean",
        },
    ),
}
COMMON = {"training.num_steps": 40, "evaluation.every_steps": 5}


def command(
    variant: Variant, workdir: pathlib.Path, scores: tuple[str, ...], **settings: object
) -> list[str]:
    """The command of one run."""
    settings = COMMON | variant.settings | settings
    return [
        sys.executable, "-m", "launch.train", f"--config=configs/{variant.config}.py",
        f"--workdir={workdir}",
        *(f"--config.{name}={value}" for name, value in settings.items()),
        *(f"--config.evaluation.scores={name}" for name in scores),
    ]  # fmt: skip


def check_config(variant: Variant) -> None:
    """Raises UserError unless the variant's config exists and samples as many responses."""
    try:
        module = importlib.import_module(f"configs.{variant.config}")
    except ModuleNotFoundError:
        raise UserError(f"configs/{variant.config}.py, for {variant.title}, is missing.") from None
    found = module.get_config().training.responses_per_step
    if found != NUM_RESPONSES:
        raise UserError(
            f"configs/{variant.config}.py samples {found} responses per step; all variants must "
            f"sample {NUM_RESPONSES}."
        )


def finish(commands: list[list[str]], workdir: pathlib.Path, record: dict[str, object]) -> None:
    """Runs the commands in turn, and then records that the run is finished.

    Raises:
      SystemExit: with the name of the log, if a command fails.
    """
    if (workdir / RESULT).exists():
        return
    print(f"{time.strftime('%H:%M:%S')} {workdir}", flush=True)
    log = workdir.with_name(workdir.name + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    for one in commands:
        with log.open("a") as out:
            status = subprocess.run(one, stdout=out, stderr=out, check=False).returncode
        if status:
            raise SystemExit(f"{' '.join(one)} ended with status {status}; see {log}")
    write_json(workdir / RESULT, record | {"machine": machine.description()})


def study(output: pathlib.Path, seeds: list[int], variants: list[str]) -> None:
    """Makes all runs that are not finished."""
    for name in variants:
        check_config(VARIANTS[name])
    for seed in seeds:
        # A run of no steps makes the warm start and evaluates it.
        start = output / f"seed{seed}" / algorithm_report.START
        first = command(VARIANTS["grpo"], start, ALL_SCORES, seed=seed, **{"training.num_steps": 0})
        finish([first], start, {"title": "warm start", "seed": seed})
        for name in variants:
            variant, workdir = VARIANTS[name], output / f"seed{seed}" / name
            settings = {
                "seed": seed,
                "model.path": os.path.abspath(start / "warm_start"),
                "warm_start.num_steps": 0,
            }
            # pass@8 takes as many responses as 16 training steps. Only the last weights are sampled
            # for it: the second command resumes the run after its last step and evaluates again.
            commands = [command(variant, workdir, s, **settings) for s in (GREEDY, ALL_SCORES)]
            finish(commands, workdir, {"title": variant.title, "seed": seed})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, required=True, help="directory of all runs")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--report", action="store_true", help="only write the page and its figure")
    arguments = parser.parse_args()
    try:
        if arguments.report:
            algorithm_report.write(arguments.output, list(VARIANTS))
        else:
            study(arguments.output, arguments.seeds, arguments.variants)
    except UserError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
