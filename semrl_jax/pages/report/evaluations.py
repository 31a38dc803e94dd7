"""Finished results of `launch.evaluate`: `eval_results.csv`, and their figures over steps."""

from __future__ import annotations

import csv
import io
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import read_json_object, replacing

RECORD, RESULTS, TABLE = "evaluation.json", "results.json", "eval_results.csv"
SIZE = "num_"  # beginning of the names of counts


class Evaluated(NamedTuple):
    """The results of one policy."""

    run: str
    step: int  # of the run; 0 for a policy that is no checkpoint
    file: pathlib.Path
    benchmarks: Mapping[str, Mapping[str, Any]]  # content of the file


def find_evaluated(path: pathlib.Path) -> list[Evaluated]:
    """The results at any depth below a directory, by run and step; [] if there is none.

    UserError if a file is damaged, or a policy was evaluated twice on one benchmark.
    """
    found = []
    for file in sorted(path.rglob(RESULTS)):
        try:
            name = read_json_object(file.parent / RECORD).get("policy")
        except FileNotFoundError:
            continue  # a file of another program
        # Earlier releases recorded no name. They named directories by policies, unless it was one.
        directory = str(file.parent.relative_to(path)) if file.parent != path else path.name
        found.append(read_evaluated(name if isinstance(name, str) else directory, file))
    found.sort(key=lambda one: (one.run, one.step))
    seen: dict[tuple[str, int, str], pathlib.Path] = {}
    for one in found:
        for benchmark in one.benchmarks:
            other = seen.setdefault((one.run, one.step, benchmark), one.file)
            if other != one.file and not re.match("average(/|$)", benchmark):
                raise UserError(
                    f"{other} and {one.file} have results of {one.run!r:.100}, step {one.step}, on "
                    f"{benchmark!r:.100}; name a directory with one of them."
                )
    return found


def read_evaluated(name: str, file: pathlib.Path) -> Evaluated:
    """The results in a file; `name` is the name of the policy, such as "quickstart-step40"."""
    found = read_json_object(file)
    if bad := [key for key, row in found.items() if not isinstance(row, dict)]:
        raise UserError(f"{file} has no results of {bad[0]!r:.100}; evaluate it again.")
    of_run = re.fullmatch(r"(.+)-step(\d{1,15})", name, re.DOTALL)
    run, step = (of_run[1], int(of_run[2])) if of_run else (name, 0)
    return Evaluated(run, step, file, found)


def write_table(file: pathlib.Path, found: Sequence[Evaluated]) -> None:
    """Writes a row per policy and benchmark, with all figures and their standard errors.

    A figure that a benchmark does not have is empty.
    """
    rows = [(one, name, row) for one in found for name, row in one.benchmarks.items()]
    present = {key: None for *_, row in rows for key in row if not key.endswith("_interval")}
    names = sorted(present, key=lambda name: not name.startswith(SIZE))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "step", "benchmark", *names])
    for one, benchmark, row in rows:
        writer.writerow([one.run, one.step, benchmark, *map(row.get, names)])
    with replacing(file) as out:
        out.write(text.getvalue().encode(errors="replace"))


def rows_of(found: Sequence[Evaluated]) -> list[dict[str, Any]]:
    """The results of one run as rows of a log, with the keys of evaluations in a run."""
    rows: dict[int, dict[str, Any]] = {}
    for one in found:
        row = rows.setdefault(one.step, {"step": one.step})
        for benchmark, figures in one.benchmarks.items():
            for name, value in figures.items():
                if not name.startswith(SIZE) and not name.endswith("_interval"):
                    row[f"eval/{benchmark}/{name}"] = value
    return [rows[step] for step in sorted(rows)]
