"""Correlation of the effective rank with its velocity and its acceleration."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from semrl_jax.analysis.responses import RANKS, measure_response, number_text, write_csv
from semrl_jax.analysis.study import EQUAL_LENGTH, correlation
from semrl_jax.metrics import WINDOWS

# Column of the CSV file -> its name in the table, which must be narrow, and the digits shown.
COLUMNS = {
    "source": ("source", None),
    "window": ("window", None),
    "stride": ("s", 0),
    "responses": ("N", 0),
    "tokens": ("T", 0),
    "effective_rank": ("ER", 1),
    "effective_rank_velocity": ("ERV", 2),
    "effective_rank_acceleration": ("ERA", 2),
    "r_velocity": ("r ERV", 2),
    "r_acceleration": ("r ERA", 2),
    "r_velocity_equal_length": ("r ERV|T", 2),
    "r_acceleration_equal_length": ("r ERA|T", 2),
}
COLOURS = ("#1f5fa8", "#d1662a", "#3a8f5c", "#7a4fa3", "#8c8c8c")


@dataclasses.dataclass(frozen=True, eq=False)
class Correlation:
    """ER, ERV and ERA of the N responses that have all three, under one window and stride.

    Attributes:
      source: name of the origin of the responses.
      window, stride: as in `metrics.rank_dynamics`.
      tokens: lengths of the responses.
      effective_rank, velocity, acceleration: float32.
    """

    source: str
    window: str
    stride: int
    tokens: Int[np.ndarray, " N"]
    effective_rank: Float[np.ndarray, " N"]
    velocity: Float[np.ndarray, " N"]
    acceleration: Float[np.ndarray, " N"]

    def with_rank(self, order: str, *, equal_length: bool = False) -> float:
        """Pearson correlation of ER with "velocity" or "acceleration".

        With `equal_length`, the partial correlation: all of them grow with the length, which alone
        would correlate them. NaN as in `study.correlation`.
        """
        columns = {name: getattr(self, name).astype(float) for name in ("effective_rank", order)}
        table = {"group_id": np.arange(len(self.tokens)), "length": self.tokens, **columns}
        return correlation(table, *columns, EQUAL_LENGTH if equal_length else "all").r


def correlate(
    responses: Sequence[Float[np.ndarray, "_ D"]],
    *,
    strides: Sequence[int],
    windows: Sequence[str] = WINDOWS,
    method: str = "gram",
    source: str = "responses",
) -> list[Correlation]:
    """Measures every response under each window and stride.

    Args:
      responses: final states, each of its own length; at least one.
      strides, windows, method: as in `metrics.hidden_state_metrics`, with the same errors.

    Returns:
      One `Correlation` per window and stride, windows outermost.
    """
    tokens = np.array([len(states) for states in responses])
    found = []
    for window in windows:
        for stride in strides:
            options = {"stride": stride, "window": window, "method": method}
            measured = [
                measure_response(states, names=("effective_rank",), **options)
                for states in responses
            ]
            values = np.array([[row[name] for name in RANKS] for row in measured], np.float32)
            valid = ~np.isnan(values).any(axis=1)
            found.append(Correlation(source, window, stride, tokens[valid], *values[valid].T))
    return found


def correlation_table(correlations: Sequence[Correlation]) -> Table:
    """One line per correlation: number of responses, means, and the coefficients with ER."""
    title = "effective rank beside its velocity and acceleration; r is with ER, |T at equal length"
    table = Table(title=title, padding=0, box=box.SIMPLE_HEAD)
    for name, digits in COLUMNS.values():
        table.add_column(name, justify="left" if digits is None else "right", no_wrap=True)
    for found in correlations:
        columns = zip(_values(found), COLUMNS.values())
        table.add_row(
            *(
                value if digits is None else number_text(value, f".{digits}f")
                for value, (_, digits) in columns
            )
        )
    return table


def write_correlations(
    directory: pathlib.Path, name: str, correlations: Sequence[Correlation]
) -> None:
    """Writes NAME.csv, the table in full precision, and NAME.png.

    Several strides in one picture would hide each other, so only the middle one is drawn.
    """
    write_csv(directory / f"{name}.csv", COLUMNS, map(_values, correlations))
    strides = sorted({c.stride for c in correlations})
    drawn = [c for c in correlations if c.stride == strides[len(strides) // 2]]
    draw_correlations(drawn).savefig(directory / f"{name}.png", dpi=110)


def draw_correlations(correlations: Sequence[Correlation]) -> Figure:
    """Scatters ERV and ERA over ER; one column per window, one colour per source.

    If ER spans more than a decade, its axis is logarithmic and the others are "symlog", so that ERV
    in proportion to ER gives a line of slope one.
    """
    windows = list(dict.fromkeys(c.window for c in correlations))
    ranks = np.concatenate([c.effective_rank for c in correlations])
    wide = len(ranks) > 0 and ranks.max() > 10 * ranks.min() > 0
    figure = Figure(figsize=(3.6 * len(windows) + 0.4, 6.4), layout="constrained")
    grid = figure.subplots(2, len(windows), squeeze=False, sharex=True, sharey="row")
    for column, window in enumerate(windows):
        labels = {"velocity": "ERV (rank)", "acceleration": "ERA (rank per stride)"}
        for row, (order, label) in enumerate(labels.items()):
            axes = grid[row][column]
            for index, c in enumerate(c for c in correlations if c.window == window):
                axes.scatter(
                    c.effective_rank, getattr(c, order), s=9, alpha=0.6, lw=0,
                    color=COLOURS[index % len(COLOURS)],
                    label=f"{c.source}: r = {number_text(c.with_rank(order), '.2f')}",
                )  # fmt: skip
            axes.set_title(f"window: {window}" if row == 0 else "", fontsize=10, loc="left")
            axes.set_ylabel(label if column == 0 else "")
            axes.set_xlabel("ER" if row == 1 else "")
            if wide:
                axes.set_xscale("log")
                axes.set_yscale("symlog", linthresh=1.0)  # an acceleration may be negative
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(fontsize=7, frameon=False, handletextpad=0.2, borderpad=0.2)
    return figure


def _values(c: Correlation) -> list[str | int | float]:
    """The values of COLUMNS; means are over the responses of the correlation."""
    series = (c.tokens, c.effective_rank, c.velocity, c.acceleration)
    means = (float(values.mean()) if len(values) else float("nan") for values in series)
    coefficients = (
        c.with_rank(order, equal_length=equal_length)
        for equal_length in (False, True)
        for order in ("velocity", "acceleration")
    )
    return [c.source, c.window, c.stride, len(c.tokens), *means, *coefficients]
