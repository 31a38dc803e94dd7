"""Metrics of single responses: a table of metrics, and effective rank along each response."""

from __future__ import annotations

import csv
import functools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import matplotlib
import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure
from rich.table import Table

from semrl_jax.metrics import Measurement, MetricKey, hidden_state_metrics, rank_series

matplotlib.use("Agg")

# Column of the table -> metric. "tokens" comes before them.
COLUMNS = {
    "ER": MetricKey("effective_rank"),
    "ERV": MetricKey("effective_rank", "velocity"),
    "ERA": MetricKey("effective_rank", "acceleration"),
    "rank": MetricKey("traditional_rank"),
    "entropy": MetricKey("response_entropy"),
    "curvature": MetricKey("curvature"),
}
MAX_TABLE_ROWS = 40

_rank_series = jax.jit(rank_series, static_argnames=("stride", "window", "method"))


class MeasuredResponses(NamedTuple):
    """Metrics of B responses.

    Attributes:
      num_tokens: [B] int64.
      metrics: [B] values and validities of COLUMNS; what is not valid is 0.0.
    """

    num_tokens: Int[np.ndarray, " B"]
    metrics: dict[MetricKey, Measurement]


class RankCurve(NamedTuple):
    """Effective rank of the growing prefixes of one response.

    Attributes:
      num_tokens: [K] tokens in each prefix; with window="release", of the last 512.
      effective_rank: [K] float32, m_j.
    """

    num_tokens: Int[np.ndarray, " K"]
    effective_rank: Float[np.ndarray, " K"]


def measure_responses(
    hidden_states: Float[np.ndarray, "B T D"],
    response_mask: Bool[np.ndarray, "B T"],
    *,
    stride: int,
    window: str = "exact",
    method: str = "gram",
) -> MeasuredResponses:
    """Measures the responses; one at a time reaches the device.

    Args:
      hidden_states: any real float dtype; rows outside the mask may hold anything.
      response_mask: True on tokens that count.
      stride, window, method: as in `metrics.hidden_state_metrics`.

    Raises:
      ValueError: for a wrong shape, dtype, stride, window or method.
    """
    measure = functools.partial(
        hidden_state_metrics,
        stride=stride,
        window=window,
        names=tuple(dict.fromkeys(key.name for key in _KEYS)),
        method=method,
        orders=("effective_rank",),
    )
    rows = [
        jax.device_get(measure(states[None], mask[None]))
        for states, mask in zip(hidden_states, response_mask)
    ]
    metrics = {
        key: Measurement(*map(np.concatenate, zip(*(row[key] for row in rows)))) for key in _KEYS
    }
    return MeasuredResponses(response_mask.sum(axis=1), metrics)


def rank_curve(
    hidden_states: Float[np.ndarray, "T D"],
    response_mask: Bool[np.ndarray, " T"],
    *,
    stride: int,
    window: str = "exact",
    method: str = "gram",
) -> RankCurve:
    """Computes m_j, the effective rank of the prefixes ERV and ERA are made of.

    Arguments as in `metrics.rank_dynamics`, which has the window rules too; "later" ends with the
    whole response. No prefix if the response is shorter than the first one, or a valid row is not
    finite.
    """
    found = _rank_series(hidden_states, response_mask, stride=stride, window=window, method=method)
    values, num_tokens, count = jax.device_get(found)
    return RankCurve(num_tokens[:count], values[:count])


def response_table(measured: MeasuredResponses) -> Table:
    """The metrics as a table: one line per response, and the means over those that are valid."""
    table = Table("response", "tokens", *COLUMNS, title="metrics of each response")
    for column in table.columns:
        column.justify = "right"
    num_responses = len(measured.num_tokens)
    columns = [measured.metrics[key] for key in _KEYS]
    for i in range(min(num_responses, MAX_TABLE_ROWS)):
        cells = (f"{value[i]:.4g}" if valid[i] else "-" for value, valid in columns)
        table.add_row(str(i), str(measured.num_tokens[i]), *cells)
    if num_responses > MAX_TABLE_ROWS:
        table.add_row(f"{num_responses - MAX_TABLE_ROWS} more", *[""] * (len(COLUMNS) + 1))
    table.add_section()
    means = (f"{value[valid].mean():.4g}" if valid.any() else "-" for value, valid in columns)
    table.add_row("mean", f"{measured.num_tokens.mean():.1f}", *means)
    table.add_row("valid", "", *(f"{valid.sum()}/{num_responses}" for _, valid in columns))
    return table


def write_responses(file: pathlib.Path, measured: MeasuredResponses) -> None:
    """Writes one CSV line per response; the cell of a metric that is not valid is empty."""
    with open(file, "w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["response", "tokens", *(key.label for key in _KEYS)])
        columns = [measured.metrics[key] for key in _KEYS]
        for i, num_tokens in enumerate(measured.num_tokens):
            values = (value[i] if valid[i] else "" for value, valid in columns)
            writer.writerow([i, num_tokens, *values])


def write_rank_curves(file: pathlib.Path, curves: Sequence[RankCurve]) -> None:
    """Writes one CSV line per prefix: response, tokens, effective_rank."""
    with open(file, "w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["response", "tokens", "effective_rank"])
        for i, curve in enumerate(curves):
            writer.writerows([i, *point] for point in zip(*curve))


def draw_rank_curves(curves: Sequence[RankCurve], *, window: str = "exact") -> Figure:
    """Draws ER along each response, and their mean while at least half of them go on."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    drawn = [curve for curve in curves if len(curve.num_tokens)]
    for curve in drawn:
        marker = "o" if len(curve.num_tokens) == 1 else None
        axes.plot(*curve, color="#1f5fa8", alpha=max(0.15, 0.8 / len(drawn)), lw=1, marker=marker)
    by_size: dict[int, list[float]] = {}
    for curve in drawn:
        for num_tokens, value in zip(*curve):
            by_size.setdefault(int(num_tokens), []).append(float(value))
    # The last point of "later" lies at the response's own length, which few others share.
    mean = [(n, np.mean(v)) for n, v in sorted(by_size.items()) if 2 * len(v) >= len(drawn)]
    if mean:
        label = f"mean of {len(drawn)} responses, while half of them go on"
        axes.plot(*zip(*mean), color="#d1662a", lw=2.6, label=label)
        axes.legend(frameon=False, fontsize=9)
    else:
        reason = "no response has a prefix of one stride"
        axes.text(0.5, 0.5, reason, ha="center", transform=axes.transAxes)
    span = "tokens of the last 512" if window == "release" else "response tokens"
    axes.set_xlabel(f"{span} (window: {window})")
    axes.set_ylabel("effective rank of the prefix")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


_KEYS = tuple(COLUMNS.values())
