"""Metrics of single responses: a table of metrics, and effective rank along each response."""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure
from rich.table import Table

from semrl_jax.metrics import Measurement, MetricKey, hidden_state_metrics, rank_series

# Column of the table, after "response" and "tokens" -> metric.
COLUMNS = {
    "ER": MetricKey("effective_rank"),
    "ERV": MetricKey("effective_rank", "velocity"),
    "ERA": MetricKey("effective_rank", "acceleration"),
    "rank": MetricKey("traditional_rank"),
    "entropy": MetricKey("response_entropy"),
    "curvature": MetricKey("curvature"),
}
_KEYS = tuple(COLUMNS.values())
MAX_TABLE_ROWS = 40

_rank_series = jax.jit(rank_series, static_argnames=("stride", "window", "method"))


class MeasuredResponses(NamedTuple):
    """Metrics of B responses.

    Attributes:
      num_tokens: int64.
      metrics: [B] values and validities of COLUMNS; a value that is not valid is 0.0.
    """

    num_tokens: Int[np.ndarray, " B"]
    metrics: dict[MetricKey, Measurement]


class RankCurve(NamedTuple):
    """Effective rank of the growing prefixes of one response.

    Attributes:
      num_tokens: tokens in each prefix; with window="release", of the last 512.
      effective_rank: float32, m_j.
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
    """Measures the responses on the device, one at a time.

    Arguments and errors as in `metrics.hidden_state_metrics`.
    """
    options: dict[str, Any] = {"stride": stride, "window": window, "method": method}
    names = tuple(dict.fromkeys(key.name for key in _KEYS))
    rows = [
        jax.device_get(
            hidden_state_metrics(
                states[None], mask[None], names=names, orders=("effective_rank",), **options
            )
        )
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
    """Computes m_j, the effective ranks of the prefixes from which ERV and ERA follow.

    Arguments and windows as in `metrics.rank_dynamics`; "later" ends with the whole response. The
    curve is empty if the response is shorter than the first prefix, or a valid row is not finite.
    """
    found = _rank_series(hidden_states, response_mask, stride=stride, window=window, method=method)
    values, num_tokens, count = jax.device_get(found)
    return RankCurve(num_tokens[:count], values[:count])


def response_table(measured: MeasuredResponses) -> Table:
    """The metrics as a table: one line per response, and the means over valid values."""
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
    columns = [measured.metrics[key] for key in _KEYS]
    rows = (
        [i, num_tokens, *(value[i] if valid[i] else "" for value, valid in columns)]
        for i, num_tokens in enumerate(measured.num_tokens)
    )
    write_csv(file, ["response", "tokens", *(key.label for key in _KEYS)], rows)


def write_rank_curves(file: pathlib.Path, curves: Sequence[RankCurve]) -> None:
    """Writes one CSV line per prefix: response, tokens, effective_rank."""
    rows = ([i, *point] for i, curve in enumerate(curves) for point in zip(*curve))
    write_csv(file, ["response", "tokens", "effective_rank"], rows)


def write_csv(file: pathlib.Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Writes a CSV file with a header line."""
    with open(file, "w", newline="") as out:
        csv.writer(out).writerows([header, *rows])


def draw_rank_curves(curves: Sequence[RankCurve], *, window: str = "exact") -> Figure:
    """Draws ER along each response, and the mean while at least half of the responses last."""
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
    # The last point of "later" is at the response's own length, which few others have.
    mean = [(n, np.mean(v)) for n, v in sorted(by_size.items()) if 2 * len(v) >= len(drawn)]
    if mean:
        label = f"mean of {len(drawn)} responses, while half of them last"
        axes.plot(*zip(*mean), color="#d1662a", lw=2.6, label=label)
        axes.legend(frameon=False, fontsize=9)
    else:
        text = "no response has a prefix of one stride"
        axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)
    span = "tokens of the last 512" if window == "release" else "response tokens"
    axes.set_xlabel(f"{span} (window: {window})")
    axes.set_ylabel("effective rank of the prefix")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
