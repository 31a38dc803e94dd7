"""Comparison of policies, or of the steps of a run, on the same problems."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from semrl_jax.evaluation import statistics
from semrl_jax.evaluation.results import (
    Figures,
    Results,
    as_results,
    figure_text,
    is_average,
    main_figures,
    names_of,
    narrow_table,
    sizes_text,
)
from semrl_jax.evaluation.samples import Sample, by_problem
from semrl_jax.evaluation.support import Support, support
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import replacing

matplotlib.use("Agg")

MAX_PANELS = 60
MAX_LINES = 10  # of a panel
COLUMNS = 3
MAX_TICKS = 12


def compare(evaluated: Mapping[str, Mapping[str, Figures]]) -> dict[str, Any]:
    """What `comparison.json` holds: the results of all policies, and differences from the first.

    `differences` are by policy other than the first, benchmark and figure, with the fields of
    `statistics.Difference`. Averages over different benchmarks have none. UserError if there is no
    policy, or a benchmark has other problems for one of them.
    """
    if not evaluated:
        raise UserError("a comparison needs at least one policy.")
    first, *others = evaluated
    base = evaluated[first]
    differences: dict[str, Any] = {}
    for name in others:
        differences[name] = {}
        for benchmark, found in evaluated[name].items():
            if benchmark not in base:
                continue
            if found.problems == base[benchmark].problems:
                differences[name][benchmark] = _differences(found, base[benchmark])
            elif not is_average(benchmark):
                raise UserError(
                    f"{name!r:.100} and {first!r:.100} were evaluated on different problems of "
                    f"{benchmark!r:.100}; evaluate both on the same ones to compare them."
                )
    return {
        "first": first,
        "results": {name: as_results(found) for name, found in evaluated.items()},
        "differences": differences,
    }


def _differences(found: Figures, base: Figures) -> dict[str, Any]:
    rows = {}
    for key, value in found.values.items():
        if key in base.values:
            difference = statistics.difference(
                value, found.draws[key], base.values[key], base.draws[key]
            )
            if not math.isnan(difference.difference):
                rows[key] = {
                    "difference": difference.difference,
                    "interval": list(difference.interval),
                    "share_above": difference.share_above,
                }
    return rows


def supports(samples: Mapping[str, Sequence[Sample]]) -> dict[str, dict[str, Support]]:
    """`Support` by name of the policy, without the first, and of the benchmark.

    Benchmarks with one response to each problem have none.
    """
    by_benchmark: dict[str, dict[str, list[Sample]]] = {}
    for name, of_policy in samples.items():
        for sample in of_policy:
            by_benchmark.setdefault(sample.benchmark, {}).setdefault(name, []).append(sample)
    first, *others = samples
    found: dict[str, dict[str, Support]] = {name: {} for name in others}
    for benchmark, by_policy in by_benchmark.items():
        problems = {name: by_problem(of_policy) for name, of_policy in by_policy.items()}
        for name in others:
            if first in problems and name in problems and len(problems[first][0]) > 1:
                compared = support(problems[first], problems[name])
                found[name] |= {} if compared is None else {benchmark: compared}
    return found


def comparison_table(comparison: Mapping[str, Any]) -> Table:
    """One line per benchmark and policy: each figure, and its difference from the first policy."""
    first, found = comparison["first"], comparison["results"]
    table = narrow_table(f"percent, ± half of the 95 % interval; (difference from {first:.60})")
    for title in ("benchmark", "policy", "problems x\nsamples"):
        table.add_column(title, justify="right" if title.startswith("problems") else "left")
    names = main_figures(list(dict.fromkeys(n for rows in found.values() for n in names_of(rows))))
    for name in names:
        table.add_column(name, justify="right")
    benchmarks = dict.fromkeys(benchmark for rows in found.values() for benchmark in rows)
    for benchmark in benchmarks:
        for policy, rows in found.items():
            if row := rows.get(benchmark):
                differences = comparison["differences"].get(policy, {}).get(benchmark, {})
                cells = [
                    figure_text(row, name) + _difference_text(differences.get(name))
                    for name in names
                ]
                table.add_row(
                    benchmark.replace("[", r"\["), policy.replace("[", r"\["), sizes_text(row),
                    *cells,
                )  # fmt: skip
        table.add_section()
    return table


def _difference_text(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    low, high = found["interval"]
    return f"\n({100 * found['difference']:+.1f} ±{50 * (high - low):.1f})"


def draw_curves(steps: Mapping[str, Mapping[int, Results]]) -> Figure:
    """Draws all accuracies of one run over its steps, or the first of them of several runs.

    There is one panel per benchmark, with bands of 95 %.
    """
    all_steps = sorted({step for by_step in steps.values() for step in by_step})
    rows = [found for by_step in steps.values() for found in by_step.values()]
    panels = list(dict.fromkeys(benchmark for found in rows for benchmark in found))
    figures = main_figures(list(dict.fromkeys(n for found in rows for n in names_of(found))))
    figures = figures[: 1 if len(steps) > 1 else MAX_LINES]
    left_out = len(panels) - MAX_PANELS
    panels = panels[:MAX_PANELS]
    num_columns = min(COLUMNS, max(len(panels), 1))
    num_rows = max(-(-len(panels) // COLUMNS), 1)
    figure = Figure(figsize=(4.6 * num_columns, 3.1 * num_rows + 0.5), layout="constrained")
    for index, benchmark in enumerate(panels):
        axes = figure.add_subplot(num_rows, num_columns, index + 1)
        sizes = ""
        for run, by_step in steps.items():
            for name in figures:
                found = [
                    (step, row[name], *row[f"{name}_interval"])
                    for step, results in sorted(by_step.items())
                    if (row := results.get(benchmark)) and row.get(name) is not None
                ]
                if not found:
                    continue
                sizes = sizes_text(by_step[found[0][0]][benchmark])
                at, values, low, high = zip(*found)
                label = " ".join([run] * (len(steps) > 1) + [name] * (len(figures) > 1))
                # Names are the user's. Matplotlib reads $...$ as mathematics.
                (line,) = axes.plot(
                    at, [100 * v for v in values], marker="o", ms=3, lw=1.4,
                    label=label.replace("$", r"\$") or None,
                )  # fmt: skip
                band = [[100 * v for v in bound] for bound in (low, high)]
                axes.fill_between(at, *band, color=line.get_color(), alpha=0.12, lw=0)
        title = benchmark if len(benchmark) <= 32 else benchmark[:29] + "..."
        axes.set_title(f"{title}  ({sizes})".replace("$", r"\$"), fontsize=10, loc="left")
        if len(all_steps) <= MAX_TICKS:
            axes.set_xticks(all_steps)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_xlabel("step", fontsize=8)
        axes.set_ylabel("percent" if len(figures) != 1 else f"{figures[0]}, percent", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=max(axes.get_ylim()[0], -2), top=min(axes.get_ylim()[1], 102))
        if index == 0 and axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, frameon=False)
    if left_out > 0:
        figure.supxlabel(f"{left_out} more benchmarks are not drawn", fontsize=8)
    return figure


def write_curves(file: pathlib.Path, steps: Mapping[str, Mapping[int, Results]]) -> None:
    """Writes `draw_curves` as PNG; the file is complete or missing."""
    with replacing(file) as out:
        draw_curves(steps).savefig(out, format="png", dpi=110)
