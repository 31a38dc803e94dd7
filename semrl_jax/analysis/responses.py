"""What single responses measure: a table of metrics, and effective rank along each response."""

from __future__ import annotations

import csv
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import matplotlib
import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from matplotlib.figure import Figure
from rich.table import Table

from semrl_jax.metrics import hidden_state_metrics, rank_series

matplotlib.use("Agg")

# Column of the table -> metric. "tokens" comes before them.
COLUMNS = {
    "ER": "effective_rank",
    "ERV": "effective_rank_velocity",
    "ERA": "effective_rank_acceleration",
    "rank": "traditional_rank",
    "entropy": "response_entropy",
    "curvature": "curvature",
}
MAX_TABLE_ROWS = 40

_rank_series = jax.jit(rank_series, static_argnames=("stride", "window", "method"))

Measured = Mapping[str, Shaped[np.ndarray, " B"]]


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
) -> dict[str, Shaped[np.ndarray, " B"]]:
    """Measures each response; one at a time reaches the device.

    Args:
      hidden_states: any real float dtype; rows outside the mask may hold anything.
      response_mask: True on tokens that count.
      stride, window, method: as in `metrics.hidden_state_metrics`.

    Returns:
      `tokens` [B] int64, and for each metric of COLUMNS the float32 array and a bool one named
      `<metric>_valid`; what is not valid is 0.0.

    Raises:
      ValueError: for a wrong shape, dtype, stride, window or method.
    """
    measure = functools.partial(
        hidden_state_metrics,
        stride=stride,
        window=window,
        names=("effective_rank", "traditional_rank", "response_entropy", "curvature"),
        method=method,
        orders=("effective_rank",),
    )
    rows = []
    for states, mask in zip(hidden_states, response_mask):
        row = {name: value[0] for name, value in measure(states[None], mask[None]).items()}
        rows.append(jax.device_get(row))
    measured = {"tokens": response_mask.sum(axis=1)}
    for metric in COLUMNS.values():
        for name in (metric, f"{metric}_valid"):
            measured[name] = np.array([row[name] for row in rows])
    return measured


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


def response_table(measured: Measured) -> Table:
    """The metrics as a table: a line a response, and the means over those that are valid."""
    table = Table("response", "tokens", *COLUMNS, title="metrics of each response")
    for column in table.columns:
        column.justify = "right"
    num_responses = len(measured["tokens"])
    for i in range(min(num_responses, MAX_TABLE_ROWS)):
        table.add_row(str(i), str(measured["tokens"][i]), *(_cell(measured, m, i) for m in _ROW))
    if num_responses > MAX_TABLE_ROWS:
        table.add_row(f"{num_responses - MAX_TABLE_ROWS} more", *[""] * (len(COLUMNS) + 1))
    table.add_section()
    valid = {metric: measured[f"{metric}_valid"] for metric in _ROW}
    means = (f"{measured[m][valid[m]].mean():.4g}" if valid[m].any() else "-" for m in _ROW)
    table.add_row("mean", f"{measured['tokens'].mean():.1f}", *means)
    table.add_row("valid", "", *(f"{valid[m].sum()}/{num_responses}" for m in _ROW))
    return table


def write_responses(file: pathlib.Path, measured: Measured) -> None:
    """Writes one CSV line a response; the cell of a metric that is not valid is empty."""
    with open(file, "w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["response", "tokens", *_ROW])
        for i, num_tokens in enumerate(measured["tokens"]):
            values = (measured[m][i] if measured[f"{m}_valid"][i] else "" for m in _ROW)
            writer.writerow([i, num_tokens, *values])


def write_rank_curves(file: pathlib.Path, curves: Sequence[RankCurve]) -> None:
    """Writes one CSV line a prefix: response, tokens, effective_rank."""
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


_ROW = tuple(COLUMNS.values())


def _cell(measured: Measured, metric: str, index: int) -> str:
    """The value, or a dash where there is none."""
    return f"{measured[metric][index]:.4g}" if measured[f"{metric}_valid"][index] else "-"
