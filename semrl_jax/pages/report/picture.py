"""`curves.png`: the main quantities of a run over its steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from semrl_jax.pages.report.panels import PANELS
from semrl_jax.pages.report.reading import series

matplotlib.use("Agg")

COLOURS = (
    "#1f5fa8", "#d1662a", "#3a8f5c", "#7a4fa3", "#b8364a", "#8a6d1f", "#2a9db0", "#c2529d",
    "#5f6b76",
)  # fmt: skip
LINE_STYLES = ("-", "--", ":")  # the next style is used when the colours repeat
MAX_LABELS_INSIDE = 5  # of a panel; a longer legend is drawn below it


def draw_curves(rows: Sequence[dict[str, float | int | None]]) -> Figure:
    """Draws one panel per quantity over the steps; leaves out quantities that were not logged."""
    steps = [row["step"] for row in rows]
    values = series(rows)
    present = set(values)
    panels = [panel.present(present) for panel in PANELS if panel.in_picture]
    panels = [panel for panel in panels if panel.keys]
    num_columns = 3
    num_rows = -(-len(panels) // num_columns)
    longest = max((len(panel.keys) for panel in panels), default=0)
    num_below = longest if longest > MAX_LABELS_INSIDE else 0
    height = 3.0 * max(num_rows, 1) + 0.08 * num_below
    figure = Figure(figsize=(4.6 * num_columns, height), layout="constrained")
    for index, panel in enumerate(panels):
        keys = panel.keys
        axes = figure.add_subplot(num_rows, num_columns, index + 1)
        styles = itertools.cycle(itertools.product(LINE_STYLES, COLOURS))
        for (style, colour), (key, label) in zip(styles, keys.items()):
            points = [point for point in zip(steps, values[key]) if point[1] is not None]
            marker = "o" if len(points) < 30 else None
            look = {"color": colour, "ls": style, "marker": marker, "ms": 3, "lw": 1.4}
            axes.plot(*zip(*points), label=_plain(label), **look)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_title(panel.title, fontsize=10, loc="left")
        axes.set_ylabel(panel.unit, fontsize=8)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        first = [value for value in values[next(iter(keys))] if value is not None]
        if panel.limits is not None and first:
            axes.set_ylim(panel.limits(first, *axes.get_ylim()))
        if len(keys) > 1 or panel.has_legend:
            place = {}
            if len(keys) > MAX_LABELS_INSIDE:
                place = {"loc": "upper left", "bbox_to_anchor": (0, -0.18), "ncols": 2}
            axes.legend(fontsize=7, frameon=False, **place)
    return figure


def _plain(label: str) -> str:
    """The text of a label as Matplotlib draws it, without mathematics or unpaired surrogates."""
    return label.encode(errors="replace").decode().replace("$", r"\$")
