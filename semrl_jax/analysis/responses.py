"""Metrics of single responses: a table of metrics, and effective rank along each response."""

from __future__ import annotations

import csv
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure
from rich.table import Table

from semrl_jax.metrics import MetricKey, hidden_state_metrics, window_sizes
from semrl_jax.metrics.names import ORDERS
from semrl_jax.support.rounding import next_power_of_two

# Column of the table, after "response" and "tokens" -> metric.
COLUMNS = {
    "ER": MetricKey("effective_rank"),
    "ERV": MetricKey("effective_rank", "velocity"),
    "ERA": MetricKey("effective_rank", "acceleration"),
    "rank": MetricKey("traditional_rank"),
    "entropy": MetricKey("response_entropy"),
    "curvature": MetricKey("curvature"),
}
RANKS = tuple(MetricKey("effective_rank", order).label for order in ORDERS)
LABELS = tuple(key.label for key in COLUMNS.values())
MAX_TABLE_ROWS = 40
MIN_BUCKET = 64  # tokens

Columns = dict[str, np.ndarray]  # of equal length


class RankCurve(NamedTuple):
    """Effective rank of the growing prefixes of one response."""

    # Tokens in each prefix; with window="release", of the last 512
    num_tokens: Int[np.ndarray, " K"]
    effective_rank: Float[np.ndarray, " K"]  # float32, m_j


def measure_response(
    hidden_states: Float[np.ndarray, "T D"],
    response_mask: Bool[np.ndarray, " T"] | None = None,
    **options: Any,
) -> dict[str, float]:
    """Metrics of one response by label; NaN where not valid.

    Args:
      response_mask: None: all rows count, and are padded, so that few lengths are compiled.
      options: as in `metrics.hidden_state_metrics`, with the same errors.
    """
    if response_mask is None:
        num_tokens = len(hidden_states)
        response_mask = np.arange(max(next_power_of_two(num_tokens), MIN_BUCKET)) < num_tokens
        missing = len(response_mask) - num_tokens
        hidden_states = np.pad(hidden_states, ((0, missing), (0, 0)))
    found = hidden_state_metrics(hidden_states[None], response_mask[None], **options)
    return {
        key.label: float(value[0]) if valid[0] else math.nan
        for key, (value, valid) in jax.device_get(found).items()
    }


def measure_responses(
    hidden_states: Float[np.ndarray, "B T D"],
    response_mask: Bool[np.ndarray, "B T"],
    **options: Any,
) -> Columns:
    """The number of each response, its tokens, and COLUMNS; see `metrics.hidden_state_metrics`."""
    names = tuple(dict.fromkeys(key.name for key in COLUMNS.values()))
    measured = [
        measure_response(*response, names=names, orders=("effective_rank",), **options)
        for response in zip(hidden_states, response_mask)
    ]
    columns = {"response": np.arange(len(measured)), "tokens": response_mask.sum(axis=1)}
    for label in LABELS:
        columns[label] = np.array([row[label] for row in measured], np.float32)
    return columns


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
    name = ("effective_rank",)
    options: dict[str, Any] = {"stride": stride, "window": window, "method": method}
    found = hidden_state_metrics(
        hidden_states[None], response_mask[None], names=name, series=name, **options
    )
    (values,), (valid,) = jax.device_get(found[MetricKey(*name, "series")])
    sizes = window_sizes(int(response_mask.sum()), stride, window)[: valid.sum()]
    return RankCurve(np.array(sizes, np.int32), values[valid])


def response_table(measured: Columns) -> Table:
    """The metrics as a table: one line per response, and the means over valid values."""
    table = Table("response", "tokens", *COLUMNS, title="metrics of each response")
    for column in table.columns:
        column.justify = "right"
    lengths, columns = measured["tokens"], [measured[label] for label in LABELS]
    num_responses = len(lengths)
    for i in range(min(num_responses, MAX_TABLE_ROWS)):
        table.add_row(str(i), str(lengths[i]), *(number_text(values[i]) for values in columns))
    if num_responses > MAX_TABLE_ROWS:
        table.add_row(f"{num_responses - MAX_TABLE_ROWS} more", *[""] * (len(COLUMNS) + 1))
    table.add_section()
    valid = [values[~np.isnan(values)] for values in columns]
    means = (number_text(values.mean() if len(values) else math.nan) for values in valid)
    table.add_row("mean", f"{lengths.mean():.1f}", *means)
    table.add_row("valid", "", *(f"{len(values)}/{num_responses}" for values in valid))
    return table


def number_text(value: float | np.floating) -> str:
    """Four digits; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.4g}"


def write_columns(file: pathlib.Path, columns: Columns) -> None:
    """Writes columns of equal length as CSV; the cell of NaN is empty."""
    write_csv(file, columns, zip(*columns.values()))


def write_rank_curves(file: pathlib.Path, curves: Sequence[RankCurve]) -> None:
    """Writes one CSV line per prefix: response, tokens, effective_rank."""
    rows = ([i, *point] for i, curve in enumerate(curves) for point in zip(*curve))
    write_csv(file, ["response", "tokens", "effective_rank"], rows)


def write_csv(file: pathlib.Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Writes a CSV file with a header line; the cell of NaN is empty."""
    with open(file, "w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(header)
        writer.writerows(["" if cell != cell else cell for cell in row] for row in rows)


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
