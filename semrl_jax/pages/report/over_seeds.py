"""Variants of a config over seeds: means with intervals, and one picture."""

from __future__ import annotations

import csv
import fnmatch
import io
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.table import Table
from scipy import stats

from semrl_jax.pages.report.picture import COLOURS
from semrl_jax.support.safe_files import replacing

matplotlib.use("Agg")

# What is compared: the first of these that all runs have logged.
COMPARED = ("eval/*/greedy_accuracy", "eval/*/pass@1", "reward/correct", "sft/loss")
LEVEL = 0.95

Rows = Sequence[Mapping[str, float | None]]


class Estimate(NamedTuple):
    """A mean over seeds, and half of its 95 % interval, NaN for fewer than two seeds.

    Source: Student's t, for values that are normal around the mean of their variant.
    """

    mean: float
    half: float

    @classmethod
    def of(cls, values: Float[np.ndarray, " S"]) -> Estimate:
        count = len(values)
        if count < 2:
            return cls(float(np.mean(values)) if count else math.nan, math.nan)
        error = float(np.std(values, ddof=1)) / math.sqrt(count)
        return cls(float(np.mean(values)), float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * error)

    def __str__(self) -> str:
        half = "" if math.isnan(self.half) else f" ±{self.half:.3f}"
        return f"{self.mean:.3f}{half}"


class Compared(NamedTuple):
    """What a variant has reached; the arrays have one value per seed, in the order of `seeds`."""

    name: str
    seeds: tuple[int, ...]
    last: Float[np.ndarray, " S"]  # of the compared key
    over_steps: Float[np.ndarray, " S"]  # its mean after the first step
    curves: list[dict[int, float]]  # its value by step, per seed
    seconds: Float[np.ndarray, " S"]  # of all steps
    tokens: Float[np.ndarray, " S"]

    def less(self, other: Compared) -> Estimate:
        """The difference of the last values from another variant's, over the seeds of both."""
        common = [seed for seed in self.seeds if seed in other.seeds]
        ours, theirs = (
            np.array([one.last[one.seeds.index(seed)] for seed in common]) for one in (self, other)
        )
        return Estimate.of(ours - theirs)


def compared_key(runs: Sequence[Rows]) -> str:
    """The key that all runs have a value of, of `COMPARED`; "" if there is none."""
    of_runs = [{key for row in rows for key in row if row[key] is not None} for rows in runs]
    common = set.intersection(*of_runs) if of_runs else set()
    for pattern in COMPARED:
        if found := sorted(fnmatch.filter(common, pattern)):
            return found[0]
    return ""


def compared(name: str, runs: Mapping[int, Rows], key: str) -> Compared:
    """Summary of the logs of a variant, by seed."""
    curves = [
        {row["step"]: row[key] for row in rows if row.get(key) is not None}
        for rows in runs.values()
    ]

    def totals(field: str) -> Float[np.ndarray, " S"]:
        return np.array([sum(row.get(field) or 0.0 for row in rows) for rows in runs.values()])

    return Compared(
        name,
        tuple(runs),
        np.array([curve[max(curve)] for curve in curves]),
        np.array([np.mean([curve[s] for s in curve if s or len(curve) == 1]) for curve in curves]),
        curves,
        totals("time/step_s"),
        totals("response/num_tokens"),
    )


def results_table(key: str, variants: Sequence[Compared]) -> Table:
    """One line per variant; the differences are paired by seed, with the first variant."""
    table = Table(
        title=f"{key}: mean over seeds ± half of the 95 % interval (t)",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 0, 0, 1),
        caption_justify="left",
    )
    table.add_column("variant", overflow="fold")
    for title in ("seeds", "last", "over steps", "less the first", "k tokens", "minutes"):
        table.add_column(title, justify="right", no_wrap=True)
    first = variants[0]
    for one in variants:
        table.add_row(
            one.name.replace("[", r"\["),
            str(len(one.seeds)),
            str(Estimate.of(one.last)),
            str(Estimate.of(one.over_steps)),
            "" if one is first else str(one.less(first)),
            f"{np.mean(one.tokens) / 1000:.1f}",
            f"{np.mean(one.seconds) / 60:.1f}",
        )
    if min(len(one.seeds) for one in variants) < 3:
        table.caption = "Fewer than three seeds say little about the spread over seeds."
    return table


def write_csv(file: pathlib.Path, key: str, variants: Sequence[Compared]) -> None:
    """One row per run."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["variant", "seed", key, f"{key} over steps", "seconds", "tokens"])
    for one in variants:
        columns = one.seeds, one.last, one.over_steps, one.seconds, one.tokens
        writer.writerows([one.name, *values] for values in zip(*columns))
    with replacing(file) as out:
        out.write(text.getvalue().encode())


def draw(key: str, variants: Sequence[Compared]) -> Figure:
    """The curves of all seeds and their mean, and the last values with intervals."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    curves, last = figure.subplots(1, 2, width_ratios=(3, 2))
    for number, one in enumerate(variants):
        colour = COLOURS[number % len(COLOURS)]
        for curve in one.curves:
            curves.plot(*zip(*sorted(curve.items())), color=colour, lw=0.8, alpha=0.4)
        steps = sorted(set.intersection(*(set(curve) for curve in one.curves)))
        means = [np.mean([curve[step] for curve in one.curves]) for step in steps]
        curves.plot(steps, means, "o-", color=colour, lw=2.2, ms=3, label=_plain(one.name))
        mean, half = Estimate.of(one.last)
        spread = 0.0 if math.isnan(half) else half
        last.errorbar(mean, number, xerr=spread, fmt="o", color=colour, capsize=4, lw=2)
        last.plot(one.last, np.full(len(one.last), number + 0.18), ".", color=colour, alpha=0.6)
    curves.set_title(f"{key}, by seed and mean", fontsize=10, loc="left")
    curves.set_xlabel("step")
    curves.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    last.set_title("last value, 95 % interval over seeds", fontsize=10, loc="left")
    last.set_yticks(range(len(variants)), [_plain(one.name) for one in variants], fontsize=8)
    last.set_ylim(len(variants) - 0.4, -0.6)
    for axes in (curves, last):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if len(variants) > 1:
        curves.legend(fontsize=8, frameon=False)
    return figure


def _plain(name: str) -> str:
    """A name as Matplotlib draws it, which reads $...$ as mathematics."""
    return name.replace("$", r"\$")
