"""Makes the runs of docs/evidence.md, and its results.

    python -m benchmarks.evidence tiny --output=runs/evidence
    python -m benchmarks.evidence all --output=runs/evidence

The page says how many hours each study takes. The same command continues it after a kill; --seeds
and --variants name a part of it. All variants of a seed are trained, then the next seed. After each
seed, its policies sample responses to the held-out problems. At the end, and with --report from
what is there, benchmarks/results/evidence_STUDY.json, the page and its figures are written anew.
Runs that this file has already stay in it, so that several machines can share the seeds.
"""

import argparse
import pathlib
import subprocess
import sys

from benchmarks.evidence import results
from benchmarks.evidence.studies import STUDIES, Settings, Study, flags, variant
from semrl_jax.jobs.sweep import Planned, Sweep, plan
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError


def run(study: Study, output: pathlib.Path, seeds: list[int], names: list[str]) -> None:
    """Makes and evaluates the runs that are not finished."""
    shared = flags(study.settings | {"training.num_steps": study.num_steps})
    arguments = [f"--config=configs/{study.config}.py"]
    arguments += [filled(flag, output=output) for flag in shared]
    sweep = Sweep(arguments, [[]], Reporter())
    seeds = [seed for seed in seeds if any(seed in study.seeds_of(name) for name in names)]
    models = {seed: started(study, output, seed) for seed in seeds} if study.start else {}
    unchecked = set(names)
    for seed in seeds:
        chosen = {name: study.variants[name] for name in names if seed in study.seeds_of(name)}
        policies = [models[seed]] if models else []
        start = {"model.path": str(policies[0]), "warm_start.num_steps": 0} if models else {}
        runs = planned(study, output, seed, start, chosen)
        sweep.check([run for run in runs if run.variant.name in unchecked])
        unchecked -= set(chosen)
        finish(sweep.run(runs))
        # All that are finished: a policy has the name of its variant only among others. The first
        # one is a run: the evaluation takes its settings.
        finished = [run for run in planned(study, output, seed, start, study.variants)
                    if run.is_finished]  # fmt: skip
        evaluate(study, [run.workdir for run in finished] + policies, output, seed)


def started(study: Study, output: pathlib.Path, seed: int) -> pathlib.Path:
    """The model that the runs of a seed start from, which is made if it is missing."""
    directory = (output / results.START / f"seed{seed}").absolute()
    model = directory / study.start_model
    for module, *arguments in [] if (model / "config.json").is_file() else study.start:
        values = [filled(each, output=output, start=directory, seed=seed) for each in arguments]
        finish(subprocess.run([sys.executable, "-m", module, *values], check=False).returncode)
    return model


def filled(text: str, **values: object) -> str:
    for name, value in values.items():
        text = text.replace(f"${name}", str(value))
    return text


def planned(
    study: Study, output: pathlib.Path, seed: int, start: Settings, chosen: dict[str, Settings]
) -> list[Planned]:
    found = [variant(name, settings | start) for name, settings in chosen.items()]
    return plan(found, [seed], output, study.num_steps)


def evaluate(study: Study, policies: list[pathlib.Path], output: pathlib.Path, seed: int) -> None:
    """Samples responses of the last weights to the held-out problems."""
    own = {"output": results.evaluation_of(output, seed)} | study.evaluation
    command = [sys.executable, "-m", "launch.evaluate", "--quiet"]
    command += [f"--policy={policy}" for policy in policies]
    command += [f"--{flag}={value}" for flag, value in own.items()]
    finish(subprocess.run(command, check=False).returncode)


def finish(code: int) -> None:
    if code:
        raise SystemExit(code)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=[*STUDIES, "all"])
    parser.add_argument("--output", type=pathlib.Path, required=True, help="directory of all runs")
    parser.add_argument("--seeds", type=int, nargs="*", help="default: all of the plan")
    parser.add_argument("--variants", nargs="*", help="default: all of the plan")
    parser.add_argument("--report", action="store_true", help="only write results and page")
    arguments = parser.parse_args()
    try:
        chosen = {n: one for n, one in STUDIES.items() if arguments.study in (n, "all")}
        for name, study in chosen.items():
            check(name, study, arguments)
        for name, study in chosen.items():
            make(name, study, arguments)
    except UserError as error:
        raise SystemExit(f"python -m benchmarks.evidence: {error}") from None


def check(name: str, study: Study, arguments: argparse.Namespace) -> None:
    for flag, known in (("variants", list(study.variants)), ("seeds", study.all_seeds)):
        if unknown := set(getattr(arguments, flag) or ()) - set(known):
            choices = ", ".join(map(repr, known))
            raise UserError(f"--{flag}: {name} has no {min(unknown)!r}, but {choices}.")
    names, seeds = arguments.variants or study.variants, arguments.seeds or study.all_seeds
    if not any(set(seeds) & set(study.seeds_of(variant)) for variant in names):
        known = "; ".join(f"{v!r} has {', '.join(map(str, study.seeds_of(v)))}" for v in names)
        raise UserError(f"--seeds: no variant named has one of these seeds: {known}.")


def make(name: str, study: Study, arguments: argparse.Namespace) -> None:
    output = arguments.output / name
    if not arguments.report:
        names = arguments.variants or list(study.variants)
        run(study, output, arguments.seeds or study.all_seeds, names)
    results.write(name, study, output)


if __name__ == "__main__":
    main()
