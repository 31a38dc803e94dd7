"""Tables and pictures of a study."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from semrl_jax.analysis.measures import Measured
from semrl_jax.analysis.responses import write_columns, write_csv
from semrl_jax.analysis.study import (
    COUNTED,
    PAIRS,
    PANELS,
    SUBSETS,
    StudyCorrelation,
    short,
    with_interval,
)
from semrl_jax.support.response_files import KEYS

CORRECT, WRONG, UNKNOWN = "#1f5fa8", "#d1662a", "#6b6b6b"
# Unit of a measure, for the axes.
UNITS = {
    "token_entropy": "nats",
    "confidence": "nats",
    "mean_logprob": "nats",
    "count_entropy": "nats",
    "count_confidence": "nats",
    "length": "tokens",
}


def write_study(
    output: pathlib.Path, measured: Measured, found: Sequence[StudyCorrelation]
) -> list[str]:
    """Writes tables and pictures into a directory, NaN as an empty cell; returns their names."""
    names = []
    for name, table in (("responses", measured.responses), ("prompts", measured.prompts)):
        columns = {key: pa.array(values, from_pandas=False) for key, values in table.items()}
        pq.write_table(pa.table(columns), output / f"{name}.parquet")
        write_columns(output / f"{name}.csv", table)
        names += [f"{name}.parquet", f"{name}.csv"]
    write_csv(output / "correlations.csv", StudyCorrelation._fields, found)
    figures = {
        "figure1.png": draw_panels(measured, found),
        "correlations.png": draw_intervals(found),
        "measures.png": draw_measures(measured),
    }
    for name, figure in figures.items():
        figure.savefig(output / name, dpi=110)
    return [*names, "correlations.csv", *figures]


def draw_panels(measured: Measured, found: Sequence[StudyCorrelation]) -> Figure:
    """The two panels of figure 1 of arXiv:2509.23808, a point per response.

    In the paper, panel (a) has token counts; the third panel shows these. A panel whose measures
    are not known is left out, unless none is known.
    """
    panels = {PANELS[0]: "a", PANELS[1]: "b", COUNTED: "a of counts"}
    known = {(c.x, c.y): c for c in found if c.subset == "all" and not math.isnan(c.r)}
    shown = [pair for pair in panels if pair in known] or list(panels)
    figure = Figure(figsize=(4.8 * len(shown), 4.4), layout="constrained")
    for axes, pair in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown):
        _scatter(axes, measured, *pair)
        text = "not known here"
        if pair in known:
            text = f"r = {with_interval(known[pair], empty='')}"
        axes.set_title(f"({panels[pair]}) {text}", loc="left")
    _legend(figure, measured)
    return figure


def draw_measures(measured: Measured) -> Figure:
    """Every measure of the responses over their length, a point per response."""
    table = measured.responses
    names = [name for name in table if name not in (*KEYS, "length", "correct")]
    names = [name for name in names if not np.isnan(table[name].astype(float)).all()]
    num_columns = min(4, max(len(names), 1))
    num_rows = max(math.ceil(len(names) / num_columns), 1)
    figure = Figure(figsize=(2.9 * num_columns, 2.5 * num_rows + 0.3), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axes, name in zip(grid, names):
        _scatter(axes, measured, "length", name)
    for axes in grid[len(names) :]:
        axes.set_visible(False)
    _legend(figure, measured)
    return figure


def draw_intervals(found: Sequence[StudyCorrelation]) -> Figure:
    """Correlations of PAIRS in every subset, with their intervals."""
    figure = Figure(figsize=(3.3 * len(PAIRS) + 0.9, 3.4), layout="constrained")
    grid = figure.subplots(1, len(PAIRS), sharey=True, sharex=True)
    for axes, (x, y) in zip(grid, PAIRS):
        for place, subset in enumerate(SUBSETS):
            for c in (c for c in found if (c.x, c.y, c.subset) == (x, y, subset)):
                if math.isnan(c.r):
                    continue
                colour = {"correct": CORRECT, "wrong": WRONG}.get(subset, UNKNOWN)
                axes.plot([c.low, c.high], [place, place], color=colour, lw=2, alpha=0.6)
                axes.plot(c.r, place, "o", color=colour, ms=6)
                text = f"N = {c.num_responses}"
                axes.annotate(text, (1.08, place), va="center", fontsize=7, color="#555555")
        axes.axvline(0, color="#999999", lw=0.8)
        axes.set_xlim(-1.05, 1.5)
        axes.set_xticks([-1, -0.5, 0, 0.5, 1])
        axes.set_title(f"{short(x)} and {short(y)}", fontsize=10, loc="left")
        axes.set_xlabel("correlation, 95 % interval")
        axes.grid(alpha=0.25, axis="x")
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_yticks(range(len(SUBSETS)), SUBSETS)
    grid[0].invert_yaxis()
    return figure


def _scatter(axes, measured: Measured, x: str, y: str) -> None:
    table = measured.responses
    if x in table and y in table:
        for part, colour, _ in _parts(measured):
            axes.scatter(table[x][part], table[y][part], s=10, alpha=0.5, lw=0, color=colour)
    axes.set_xlabel(_axis(x))
    axes.set_ylabel(_axis(y))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _axis(name: str) -> str:
    unit = UNITS.get(name)
    return f"{short(name)} ({unit})" if unit else short(name)


def _parts(measured: Measured) -> list[tuple[np.ndarray, str, str]]:
    """Responses by correctness: which, colour, and name. The rarer ones are drawn last."""
    table = measured.responses
    correct = table.get("correct", np.full(len(table["group_id"]), math.nan))
    parts = [
        (np.isnan(correct), UNKNOWN, "not graded"),
        (correct == 0, WRONG, "wrong"),
        (correct == 1, CORRECT, "correct"),
    ]
    return sorted((part for part in parts if part[0].any()), key=lambda part: -part[0].sum())


def _legend(figure: Figure, measured: Measured) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], ls="", marker="o", color=colour, label=f"{name} ({part.sum()})")
        for part, colour, name in _parts(measured)
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False, fontsize=9)
