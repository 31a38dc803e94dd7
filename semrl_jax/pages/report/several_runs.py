"""Several runs: differences on the same held-out problems, and all rows in one CSV file."""

from __future__ import annotations

import csv
import io
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from semrl_jax.pages.report.evaluations import write_table
from semrl_jax.pages.report.reading import RunLog
from semrl_jax.pages.report.recorded_responses import spread
from semrl_jax.support import response_files
from semrl_jax.support.errors import UserError
from semrl_jax.support.run_directory import recorded
from semrl_jax.support.safe_files import replacing

MAX_STEPS = 20  # of the paired differences
Z_95 = 1.96

Problem = tuple[str, int, str]  # benchmark, number, reference


def paired(runs: Sequence[RunLog], notes: list[str] | None = None) -> list[dict[str, Any]]:
    """Differences of accuracy from the first run, at steps that both have evaluated.

    The accuracy of a problem is the mean over all its recorded responses of that step. The interval
    belongs to the mean of the differences by problem, so what makes a problem hard for both runs
    does not widen it. `notes` gets a sentence for every step that is left out.

    Returns:
      One dict per step, benchmark and run: `step`, `benchmark`, `run` (index), `problems`, `first`
      and `other` (accuracies), `difference`, and `half` of its 95 % interval, None for fewer than
      two problems. A benchmark whose problems differ between the runs is left out.
    """
    rows = []
    first = recorded(runs[0].path, "eval")
    for index, run in enumerate(runs[1:], 1):
        files = recorded(run.path, "eval")
        for step in spread(sorted(first.keys() & files.keys()), MAX_STEPS):
            try:
                damaged = f"{runs[0].name}/rollouts/{first[step].name}"
                ours = _accuracies(first[step])
                damaged = f"{run.name}/rollouts/{files[step].name}"
                theirs = _accuracies(files[step])
            except UserError:
                text = f"{damaged} cannot be read; no accuracies are compared at step {step}."
                if notes is not None and text not in notes:
                    notes.append(text)
                continue
            for benchmark in dict.fromkeys(problem[0] for problem in ours):
                problems = [problem for problem in ours if problem[0] == benchmark]
                if set(problems) != {problem for problem in theirs if problem[0] == benchmark}:
                    continue
                a = np.array([ours[problem] for problem in problems])
                b = np.array([theirs[problem] for problem in problems])
                half = None
                if len(problems) > 1:
                    half = Z_95 * float(np.std(b - a, ddof=1)) / math.sqrt(len(problems))
                rows.append(
                    {
                        "step": step,
                        "benchmark": benchmark,
                        "run": index,
                        "problems": len(problems),
                        "first": float(a.mean()),
                        "other": float(b.mean()),
                        "difference": float((b - a).mean()),
                        "half": half,
                    }
                )
    return sorted(rows, key=lambda row: (row["step"], row["benchmark"], row["run"]))


def _accuracies(file: pathlib.Path) -> dict[Problem, float]:
    """Share of correct responses of each problem."""
    table = response_files.read(file, ("benchmark", "group_id", "correct"), ("reference",))
    found: dict[Problem, list[bool]] = {}
    for row in table.to_pylist():
        problem = row["benchmark"], row["group_id"], row.get("reference")
        found.setdefault(problem, []).append(row["correct"])
    return {problem: float(np.mean(verdicts)) for problem, verdicts in found.items()}


def write_csv(file: pathlib.Path, runs: Sequence[RunLog]) -> None:
    """Writes all rows of all runs: `run`, `step`, then every key; empty where it was not logged.

    Results of evaluations have the columns of `write_table`; UserError if runs are among them.
    """
    if any(run.evaluated for run in runs):
        if training := [run.name for run in runs if not run.evaluated]:
            raise UserError(f"--csv takes runs or results, not both; leave out {training[0]}.")
        return write_table(file, [one for run in runs for one in run.evaluated])
    keys = sorted({key for run in runs for row in run.rows for key in row} - {"step"})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "step", *keys])
    for run in runs:
        writer.writerows(
            [run.name, row["step"], *(row.get(key) for key in keys)] for row in run.rows
        )
    with replacing(file) as out:
        out.write(text.getvalue().encode(errors="replace"))
