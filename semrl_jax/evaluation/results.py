"""Results of an evaluation: figures with intervals, `results.json`, tables."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import ml_collections
import numpy as np
from jaxtyping import Float
from rich import box
from rich.table import Table

from semrl_jax.evaluation import statistics
from semrl_jax.evaluation.evaluator import figures_of
from semrl_jax.evaluation.samples import NOT_SAMPLED, Sample, by_problem
from semrl_jax.support.errors import UserError

AVERAGE = "average"
SIZES = ("num_problems", "num_samples", "num_not_sampled", "num_benchmarks")
# Figures of the table, in this order; * stands for a number.
ACCURACIES = ("greedy_accuracy", "pass@*", "any@*", "mean@*", "maj@*")
SHOWN = (
    "responses/mean_score", "responses/mean_turns", "responses/mean_length",
    "responses/truncated_fraction", "responses/empty_fraction",
)  # fmt: skip
TITLES = {"responses/empty_fraction": "no answer"}
NO_SPREAD = (
    "±0.0: all problems have the same value, so a bootstrap has no spread. A share that is up to "
    "3 / problems away is not excluded (rule of three)."
)

Results = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of a benchmark, or of an average over benchmarks."""

    values: Mapping[str, float]  # by name of the figure; NaN if there is no response
    errors: Mapping[str, float]  # standard error of each
    draws: Mapping[str, Float[np.ndarray, " draws"]]  # of the bootstrap, [draws] each
    sizes: Mapping[str, int]  # of SIZES
    # (place, question, reference) of each problem; (place, name, "") of the benchmarks of an
    # average
    problems: tuple[tuple[int, str, str], ...]


def evaluate(
    samples: Sequence[Sample],
    scores: Sequence[ModuleType],
    options: ml_collections.ConfigDict,
    groups: Mapping[str, Sequence[str]] | None = None,
    own: Mapping[str, ml_collections.ConfigDict] | None = None,
) -> dict[str, Figures]:
    """The figures of each benchmark and of the averages.

    The average over a group of which all benchmarks were evaluated is "average/<group>", and
    "average" is over all, if there are two. `own` are options of benchmarks that have others.
    UserError if a score fails, a benchmark has the name of an average, or a sample is there twice.
    """
    benchmarks: dict[str, list[Sample]] = {}
    for sample in samples:
        benchmarks.setdefault(sample.benchmark, []).append(sample)
    found: dict[str, Figures] = {}
    for name, of_benchmark in benchmarks.items():
        if is_average(name):
            raise UserError(f"a benchmark has the name {name!r}, which results.json needs.")
        problems = by_problem(of_benchmark)
        _check_once(name, problems)
        figures = figures_of(scores, problems, (own or {}).get(name, options))
        found[name] = Figures(
            {key: statistics.mean(figure) for key, figure in figures.items()},
            {key: statistics.standard_error(figure) for key, figure in figures.items()},
            statistics.bootstrap(figures, name),
            {
                "num_problems": len(problems),
                "num_samples": max(map(len, problems)),
                "num_not_sampled": sum(p[0].finish_reason == NOT_SAMPLED for p in problems),
            },
            tuple((p[0].group_id, p[0].question, p[0].reference) for p in problems),
        )
    averages = {}
    for name, members in {"": list(found), **(groups or {})}.items():
        chosen = {member: found[member] for member in members if member in found}
        if 1 < len(chosen) == len(members):
            averages["/".join(filter(None, (AVERAGE, name)))] = _average(chosen)
    return found | averages


def is_average(name: str) -> bool:
    """Whether the results of this name are an average over benchmarks."""
    return name == AVERAGE or name.startswith(f"{AVERAGE}/")


def _check_once(benchmark: str, problems: Sequence[Sequence[Sample]]) -> None:
    for samples in problems:
        for one, other in itertools.pairwise(samples):
            if one.sample_index == other.sample_index:
                raise UserError(
                    f"benchmark {benchmark!r:.100}, problem {one.group_id}: sample "
                    f"{one.sample_index} is there twice; every sample counts once, so remove one."
                )


def _average(by_name: Mapping[str, Figures]) -> Figures:
    """The unweighted mean over benchmarks of the figures that all of them have."""
    members = list(by_name.values())
    names = [
        name
        for name in members[0].values
        if all(not math.isnan(m.values.get(name, math.nan)) for m in members)
    ]
    count = len(members)
    return Figures(
        {name: sum(m.values[name] for m in members) / count for name in names},
        {name: math.hypot(*(m.errors[name] for m in members)) / count for name in names},
        {name: sum(m.draws[name] for m in members) / count for name in names},
        {
            "num_benchmarks": count,
            "num_problems": sum(m.sizes["num_problems"] for m in members),
            "num_samples": max(m.sizes["num_samples"] for m in members),
            "num_not_sampled": sum(m.sizes["num_not_sampled"] for m in members),
        },
        tuple((place, name, "") for place, name in enumerate(by_name)),
    )


def as_results(evaluated: Mapping[str, Figures]) -> Results:
    """What `results.json` holds: shares in [0, 1], tokens, intervals of 95 %; None: no response."""
    found: Results = {}
    for name, figures in evaluated.items():
        found[name] = row = {}
        for key, value in figures.values.items():
            row[key] = _number(value)
            row[f"{key}_interval"] = [*map(_number, statistics.interval(figures.draws[key]))]
            row[f"{key}_stderr"] = _number(figures.errors[key])
        row.update(figures.sizes)
    return found


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def shown_figures(names: Sequence[str], patterns: Sequence[str] = ACCURACIES) -> list[str]:
    """The names that match a pattern, in the order of the patterns, then of k."""
    found = []
    for pattern in patterns:
        matching = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
        matches = [match for match in map(matching.fullmatch, names) if match]
        found += [m[0] for m in sorted(matches, key=lambda m: [int(group) for group in m.groups()])]
    return found


def main_figures(names: Sequence[str]) -> list[str]:
    """The accuracies of the tables. Of two figures with the same value, only pass@k is shown."""
    found = shown_figures(names)
    twice = {f"any@{name.removeprefix('pass@')}" for name in found if name.startswith("pass@")}
    if "pass@1" in found:
        twice |= {name for name in found if name.startswith("mean@")}
    return [name for name in found if name not in twice]


def sizes_text(row: Mapping[str, Any]) -> str:
    """Such as "500 x 16": problems x samples per problem."""
    return f"{row['num_problems']} x {row['num_samples']}"


def figure_text(row: Mapping[str, Any], name: str) -> str:
    """A figure with half the width of its interval; percent, tokens or a score."""
    value = row.get(name)
    if value is None:
        return "-"
    is_share = "length" not in name and not name.endswith(("_words", "mean_score", "mean_turns"))
    scale = 100 if is_share else 1
    low, high = row[f"{name}_interval"]
    digits = 3 if name.endswith("mean_score") else 1
    half = "" if low is None else f" ±{scale * (high - low) / 2:.{digits}f}"
    return f"{round(scale * value, digits) + 0.0:.{digits}f}{half}"  # + 0.0: no "-0.0"


def names_of(found: Results) -> list[str]:
    """The names of all figures, in order of their first occurrence."""
    names = dict.fromkeys(key for row in found.values() for key in row)
    return [
        name for name in names if name not in SIZES and not name.endswith(("_interval", "_stderr"))
    ]


def column_title(name: str) -> str:
    """The title of a figure in tables."""
    name = TITLES.get(name, name)
    return name.removeprefix("responses/").removesuffix("_fraction").replace("_", " ")


def results_table(found: Results) -> Table:
    """One line per benchmark and average; ± is half the width of the 95 % interval."""
    table = narrow_table("percent, ± half of the 95 % interval; lengths in tokens")
    table.add_column("benchmark")
    table.add_column("problems x\nsamples", justify="right")
    names = [*main_figures(names_of(found)), *shown_figures(names_of(found), SHOWN)]
    names = [name for name in names if any(row.get(name) is not None for row in found.values())]
    for name in names:
        table.add_column(column_title(name), justify="right")
    for benchmark, row in found.items():
        if benchmark == AVERAGE:
            table.add_section()
        table.add_row(
            benchmark.replace("[", r"\["),
            sizes_text(row),
            *(figure_text(row, name) for name in names),
        )
        intervals = (row.get(f"{name}_interval") for name in main_figures(names))
        if any(interval and interval[0] == interval[1] is not None for interval in intervals):
            table.caption = NO_SPREAD
    return table


def narrow_table(title: str) -> Table:
    """For many columns on a terminal of 80 to 100."""
    return Table(
        title=title,
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        show_edge=False,
        pad_edge=False,
        caption_justify="left",
    )


def selection_table(found: Results) -> Table | None:
    """What the response chosen by each value gains over chance; None without such figures."""
    gains = [name for name in names_of(found) if name.endswith("/gain")]
    if not gains:
        return None
    table = narrow_table("accuracy of the chosen response of k, percent (gain over chance)")
    for title in ("benchmark", "problems x\nsamples", "k", "chosen by", "highest", "lowest"):
        table.add_column(title, justify="left" if title in ("benchmark", "chosen by") else "right")
    for benchmark, row in found.items():
        for k, value in dict.fromkeys(
            (int(m[1]), m[2])
            for m in map(re.compile(r"best@(\d+)/(.+)/gain").fullmatch, gains)
            if m
        ):
            if row.get(f"best@{k}/{value}") is None:
                continue
            cells = [
                f"{figure_text(row, f'{kind}@{k}/{value}')} "
                f"({_signed(figure_text(row, f'{kind}@{k}/{value}/gain'))})"
                for kind in ("best", "lowest")
            ]
            table.add_row(
                benchmark.replace("[", r"\["), sizes_text(row), str(k), value.replace("[", r"\["),
                *cells,
            )  # fmt: skip
        table.add_section()
    return table


def _signed(text: str) -> str:
    return text if text.startswith("-") else f"+{text}"
