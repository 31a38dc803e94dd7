"""Draws docs/figures/NAME.png from finished runs of one config.

python docs/make_figure.py quickstart runs/quickstart
"""

from __future__ import annotations

import fnmatch
import pathlib
import sys

import matplotlib
from matplotlib.figure import Figure

from semrl_jax.runs.records import read_rows

matplotlib.use("Agg")
FIGURES = pathlib.Path(__file__).parent / "figures"
BLUE, ORANGE = "#1f5fa8", "#d1662a"
# Title, unit, and the keys to draw: key -> (label, colour).
PANELS = (
    (
        "Accuracy on held-out problems",
        "share",
        {"eval/*/greedy_accuracy": ("greedy, after the update", BLUE)},
    ),
    (
        "Reward of the sampled responses",
        "share correct",
        {"reward/correct": ("mean of the batch", BLUE)},
    ),
    (
        "Effective rank of responses",
        "directions",
        {
            "metrics/effective_rank/correct": ("correct", BLUE),
            "metrics/effective_rank/incorrect": ("wrong", ORANGE),
        },
    ),
    (
        "Shaping",
        "mean bonus / mean |advantage|",
        {"shaping/bonus_to_advantage/mean": ("bonus", BLUE)},
    ),
)


def draw(workdirs: list[pathlib.Path]) -> Figure:
    """One panel per quantity; the first run is solid, further runs are dashed."""
    figure = Figure(figsize=(9.6, 5.2), layout="constrained")
    for panel, (axes, (title, unit, keys)) in enumerate(zip(figure.subplots(2, 2).flat, PANELS)):
        for number, workdir in enumerate(workdirs):
            rows = read_rows(workdir / "metrics.jsonl")
            for key, (label, colour) in keys.items():
                points = [
                    (row["step"], row[name])
                    for row in rows
                    for name in fnmatch.filter(row, key)
                    if row[name] is not None
                ]
                axes.plot(
                    *zip(*points),
                    color=colour,
                    ls="--" if number else "-",
                    label=None if number else label,
                    marker="o" if not panel else None,
                    ms=4,
                    lw=1.5,
                    alpha=0.55 if number else 1,
                )
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylabel(unit, fontsize=8)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if panel < 2:
            axes.set_ylim(0, 1)
        if len(keys) > 1:
            place = {"loc": "lower right", "bbox_to_anchor": (1, 0.98)}  # next to the title
            axes.legend(fontsize=8, frameon=False, ncols=2, **place)
    return figure


if __name__ == "__main__":
    name, *paths = sys.argv[1:]
    draw([pathlib.Path(path) for path in paths]).savefig(FIGURES / f"{name}.png", dpi=130)
