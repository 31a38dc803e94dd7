"""Correlation of the effective rank with its velocity and its acceleration."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
from collections.abc import Sequence

import jax
import matplotlib
import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from semrl_jax.metrics import WINDOWS, MetricKey, hidden_state_metrics
from semrl_jax.metrics.names import ORDERS
from semrl_jax.rounding import next_power_of_two

matplotlib.use("Agg")

MIN_RESPONSES = 3  # two points always lie on a line
MIN_BUCKET = 64
COLOURS = ("#1f5fa8", "#d1662a", "#3a8f5c", "#7a4fa3", "#8c8c8c")


@dataclasses.dataclass(frozen=True, eq=False)
class Correlation:
    """ER, ERV and ERA of the responses that have all three, under one window and stride.

    Attributes:
      source: where the responses are from.
      window, stride: as in `metrics.rank_dynamics`.
      num_responses: how many were measured.
      tokens: [N] length of those with an ERA.
      effective_rank, velocity, acceleration: [N] float32.
    """

    source: str
    window: str
    stride: int
    num_responses: int
    tokens: Int[np.ndarray, " N"]
    effective_rank: Float[np.ndarray, " N"]
    velocity: Float[np.ndarray, " N"]
    acceleration: Float[np.ndarray, " N"]

    def with_velocity(self, *, equal_length: bool = False) -> float:
        """Pearson correlation of ER and ERV; NaN below three responses or of a constant.

        With `equal_length`, the correlation of the residuals of both after a least-squares line in
        the length. All of them grow with the length, which alone would correlate them.
        """
        return self._correlation(self.velocity, equal_length)

    def with_acceleration(self, *, equal_length: bool = False) -> float:
        """The same of ER and ERA."""
        return self._correlation(self.acceleration, equal_length)

    def _correlation(self, order: np.ndarray, equal_length: bool) -> float:
        x, y = self.effective_rank.astype(np.float64), order.astype(np.float64)
        if len(x) < MIN_RESPONSES:
            return float("nan")
        if equal_length:
            length = np.stack([np.ones(len(x)), self.tokens - self.tokens.mean()], axis=1)
            x, y = (v - length @ np.linalg.lstsq(length, v)[0] for v in (x, y))
        # After centring a constant, only rounding is left, whose correlation would be noise.
        x, y = (v - v.mean() for v in (x, y))
        scale = max(np.abs(self.effective_rank).max(), np.abs(order).max())
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
      strides, windows, method: as in `metrics.hidden_state_metrics`.
      source: goes into the results.

    Returns:
      One `Correlation` per window and stride, windows outermost.

    Raises:
      ValueError: for a wrong shape, dtype, stride, window or method.
    """
    tokens = np.array([len(states) for states in responses])
    found = []
    for window in windows:
        for stride in strides:
            measured = [_measure(states, stride, window, method) for states in responses]
            values = np.array([value for value, _ in measured], np.float32)  # [B, 3]
            valid = np.array([valid for _, valid in measured])
            found.append(
                Correlation(source, window, stride, len(responses), tokens[valid], *values[valid].T)
            )
    return found


def correlation_table(correlations: Sequence[Correlation]) -> Table:
    """One line per correlation: responses with an ERA, means, and the four coefficients with ER.

    |T marks those at equal length, see `Correlation.with_velocity`.
    """
    title = "effective rank beside its velocity and acceleration; r is with ER, |T at equal length"
    table = Table(title=title, padding=0, box=box.SIMPLE_HEAD)
    for name in _HEADER.values():
        text = name in ("source", "window")
        table.add_column(name, justify="left" if text else "right", no_wrap=True)
    for correlation in correlations:
        *plain, ranks, velocity, acceleration, r0, r1, r2, r3 = _values(correlation)
        table.add_row(
            *(str(value) for value in plain[:4]), _text(plain[4], 0), _text(ranks, 1),
            _text(velocity, 2), _text(acceleration, 2), *(_text(r, 2) for r in (r0, r1, r2, r3)),
        )  # fmt: skip
    return table


def write_correlations(file: pathlib.Path, correlations: Sequence[Correlation]) -> None:
    """Writes the table as CSV in full precision; a coefficient that does not exist is empty."""
    with open(file, "w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(_HEADER.keys())
        for correlation in correlations:
            writer.writerow("" if value != value else value for value in _values(correlation))


def draw_correlations(correlations: Sequence[Correlation]) -> Figure:
    """Scatters ERV and ERA over ER; one column per window, one colour per source or stride.

    If ER spans more than a decade, its axis is logarithmic and the others are "symlog". ERV in
    proportion to ER is then a line of slope one.
    """
    windows = list(dict.fromkeys(c.window for c in correlations))
    several_strides = len({c.stride for c in correlations}) > 1
    ranks = np.concatenate([c.effective_rank for c in correlations])
    wide = len(ranks) > 0 and ranks.max() > 10 * ranks.min() > 0
    figure = Figure(figsize=(3.6 * len(windows) + 0.4, 6.4), layout="constrained")
    grid = figure.subplots(2, len(windows), squeeze=False, sharex=True, sharey="row")
    for column, window in enumerate(windows):
        for row, (label, unit) in enumerate((("ERV", "rank"), ("ERA", "rank per stride"))):
            axes = grid[row][column]
            for index, c in enumerate(c for c in correlations if c.window == window):
                order, r = (
                    (c.velocity, c.with_velocity()),
                    (c.acceleration, c.with_acceleration()),
                )[row]
                name = f"{c.source}, stride {c.stride}" if several_strides else c.source
                axes.scatter(
                    c.effective_rank, order, s=9, alpha=0.6, lw=0,
                    color=COLOURS[index % len(COLOURS)], label=f"{name}: r = {_text(r, 2)}",
                )  # fmt: skip
            axes.set_title(f"window: {window}" if row == 0 else "", fontsize=10, loc="left")
            axes.set_ylabel(f"{label} ({unit})" if column == 0 else "")
            axes.set_xlabel("ER" if row == 1 else "")
            if wide:
                axes.set_xscale("log")
                axes.set_yscale("symlog", linthresh=1.0)  # an acceleration may be negative
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(fontsize=7, frameon=False, handletextpad=0.2, borderpad=0.2)
    return figure


# Column of the CSV file -> column of the table, where it must be narrow.
_HEADER = {
    "source": "source",
    "window": "window",
    "stride": "s",
    "responses": "N",
    "tokens": "T",
    "effective_rank": "ER",
    "effective_rank_velocity": "ERV",
    "effective_rank_acceleration": "ERA",
    "r_velocity": "r ERV",
    "r_acceleration": "r ERA",
    "r_velocity_equal_length": "r ERV|T",
    "r_acceleration_equal_length": "r ERA|T",
}


def _values(c: Correlation) -> tuple[str | int | float, ...]:
    """Values of the columns of the header; means over responses with an ERA."""
    series = (c.tokens, c.effective_rank, c.velocity, c.acceleration)
    means = (float(values.mean()) if len(values) else float("nan") for values in series)
    return (
        c.source, c.window, c.stride, len(c.tokens), *means, c.with_velocity(),
        c.with_acceleration(), c.with_velocity(equal_length=True),
        c.with_acceleration(equal_length=True),
    )  # fmt: skip


def _text(value: float, num_digits: int) -> str:
    """Fixed digits after the point, a dash for NaN."""
    return "-" if value != value else f"{value:.{num_digits}f}"


def _measure(
    states: Float[np.ndarray, "T D"], stride: int, window: str, method: str
) -> tuple[tuple[float, float, float], bool]:
    """(ER, ERV, ERA) of one response, and whether it has all."""
    bucket = max(next_power_of_two(len(states)), MIN_BUCKET)  # few shapes to compile
    padded = np.zeros((1, bucket, states.shape[1]), states.dtype)
    padded[0, : len(states)] = states
    mask = np.arange(bucket)[None] < len(states)
    measured = hidden_state_metrics(
        padded, mask, stride=stride, window=window, names=("effective_rank",), method=method
    )
    measured = jax.device_get(measured)
    orders = [measured[MetricKey("effective_rank", order)] for order in ORDERS]
    return tuple(float(value[0]) for value, _ in orders), bool(orders[-1].valid[0])
