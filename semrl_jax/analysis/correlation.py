"""Correlation of the effective rank with its velocity and its acceleration."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from semrl_jax.analysis.responses import write_csv
from semrl_jax.metrics import WINDOWS, MetricKey, hidden_state_metrics
from semrl_jax.metrics.names import ORDERS
from semrl_jax.support.rounding import next_power_of_two

MIN_RESPONSES = 3  # two points always lie on a line
MIN_BUCKET = 64
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

        With `equal_length`, the correlation of the residuals of both after a least-squares line in
        the length: all of them grow with the length, which alone would correlate them. NaN below
        three responses or if one of the two is constant.
        """
        ranks, order_values = self.effective_rank, getattr(self, order)
        x, y = ranks.astype(np.float64), order_values.astype(np.float64)
        if len(x) < MIN_RESPONSES:
            return float("nan")
        if equal_length:
            length = np.stack([np.ones(len(x)), self.tokens - self.tokens.mean()], axis=1)
            x, y = (v - length @ np.linalg.lstsq(length, v)[0] for v in (x, y))
        # A centred constant consists of rounding errors; their correlation would be noise.
        x, y = (v - v.mean() for v in (x, y))
        scale = max(np.abs(ranks).max(), np.abs(order_values).max())
        if min(np.abs(x).max(), np.abs(y).max()) <= 1e-6 * scale:
            return float("nan")
        return float(x @ y / np.sqrt((x @ x) * (y @ y)))


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
      source: stored in the results.

    Returns:
      One `Correlation` per window and stride, windows outermost.
    """
    tokens = np.array([len(states) for states in responses])
    found = []
    for window in windows:
        for stride in strides:
            measured = [_measure(states, stride, window, method) for states in responses]
            values = np.array([value for value, _ in measured], np.float32)  # [B, 3]
            valid = np.array([valid for _, valid in measured])
            found.append(Correlation(source, window, stride, tokens[valid], *values[valid].T))
    return found


def correlation_table(correlations: Sequence[Correlation]) -> Table:
    """One line per correlation: number of responses, means, and the coefficients with ER."""
    title = "effective rank beside its velocity and acceleration; r is with ER, |T at equal length"
    table = Table(title=title, padding=0, box=box.SIMPLE_HEAD)
    for name, digits in COLUMNS.values():
        table.add_column(name, justify="left" if digits is None else "right", no_wrap=True)
    for correlation in correlations:
        columns = zip(_values(correlation), COLUMNS.values())
        table.add_row(*(_text(value, digits) for value, (_, digits) in columns))
    return table


def write_correlations(file: pathlib.Path, correlations: Sequence[Correlation]) -> None:
    """Writes the table as CSV in full precision; a coefficient that does not exist is empty."""
    rows = (["" if v != v else v for v in _values(correlation)] for correlation in correlations)
    write_csv(file, COLUMNS, rows)


def draw_correlations(correlations: Sequence[Correlation]) -> Figure:
    """Scatters ERV and ERA over ER; one column per window, one colour per source or stride.

    If ER spans more than a decade, its axis is logarithmic and the others are "symlog", so that ERV
    in proportion to ER gives a line of slope one.
    """
    windows = list(dict.fromkeys(c.window for c in correlations))
    several_strides = len({c.stride for c in correlations}) > 1
    ranks = np.concatenate([c.effective_rank for c in correlations])
    wide = len(ranks) > 0 and ranks.max() > 10 * ranks.min() > 0
    figure = Figure(figsize=(3.6 * len(windows) + 0.4, 6.4), layout="constrained")
    grid = figure.subplots(2, len(windows), squeeze=False, sharex=True, sharey="row")
    for column, window in enumerate(windows):
        labels = {"velocity": "ERV (rank)", "acceleration": "ERA (rank per stride)"}
        for row, (order, label) in enumerate(labels.items()):
            axes = grid[row][column]
            for index, c in enumerate(c for c in correlations if c.window == window):
                name = f"{c.source}, stride {c.stride}" if several_strides else c.source
                axes.scatter(
                    c.effective_rank, getattr(c, order), s=9, alpha=0.6, lw=0,
                    color=COLOURS[index % len(COLOURS)],
                    label=f"{name}: r = {_text(c.with_rank(order), 2)}",
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


def _text(value: str | int | float, digits: int | None) -> str:
    """Text as it is; a number with fixed digits after the point; a dash for NaN."""
    if isinstance(value, str):
        return value
    return "-" if value != value else f"{value:.{digits}f}"


def _measure(
    states: Float[np.ndarray, "T D"], stride: int, window: str, method: str
) -> tuple[tuple[float, float, float], bool]:
    """(ER, ERV, ERA) of one response, and whether all three are valid."""
    bucket = max(next_power_of_two(len(states)), MIN_BUCKET)  # few shapes to compile
    padded = np.zeros((1, bucket, states.shape[1]), states.dtype)
    padded[0, : len(states)] = states
    mask = np.arange(bucket)[None] < len(states)
    names = ("effective_rank",)
    measured = jax.device_get(
        hidden_state_metrics(padded, mask, stride=stride, window=window, names=names, method=method)
    )
    orders = [measured[MetricKey("effective_rank", order)] for order in ORDERS]
    return tuple(float(value[0]) for value, _ in orders), bool(orders[-1].valid[0])
