"""Correlations between measures with bootstrap intervals, and a summary of a study as text."""

from __future__ import annotations

import difflib
import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from semrl_jax.analysis.measures import (
    MIN_RESPONSES,
    OF_COUNTS,
    PROMPT_MEASURES,
    RANKS,
    RESPONSE_MEASURES,
    Measured,
)
from semrl_jax.evaluation.statistics import interval
from semrl_jax.metrics import METRICS
from semrl_jax.support.errors import UserError
from semrl_jax.support.response_files import KEYS

NUM_DRAWS = 2000
_DRAWN_AT_ONCE = 2**21  # prompts, which bounds the memory
# PANELS: as in figure 1 of arXiv:2509.23808. PAIRS adds the panel of value and acceleration.
PANELS = (("token_entropy", "confidence"), RANKS[:2])
PAIRS = (*PANELS, (RANKS[0], RANKS[2]))
COUNTED = tuple(OF_COUNTS)  # what panel (a) shows in the paper
LENGTHS = ("short", "middle", "long")
EQUAL_LENGTH = "equal length"
SUBSETS = ("all", "correct", "wrong", *LENGTHS, EQUAL_LENGTH)
_IN_SUMMARY = 10  # measures
_NARROW = {  # 80 columns
    "token_entropy": "entropy", "mean_logprob": "logprob", "count_entropy": "count ent.",
    "count_confidence": "count conf",
    "elliptical_novelty": "novelty",
}  # fmt: skip
POWERS = (1, 2, 3)  # of the length that EQUAL_LENGTH takes out
MIN_DRAWN = 5  # prompts; the quantiles of fewer say little


class StudyCorrelation(NamedTuple):
    """Pearson correlation of two measures over responses."""

    x: str  # measures
    y: str
    # One of SUBSETS. The lengths are thirds of the responses by their number of tokens. "equal
    # length" is the partial correlation: of what a cubic in the length does not explain. ER and
    # ERA bend over the length, and what a line leaves of both is then mostly this bend
    subset: str
    num_responses: int  # that have both measures
    num_prompts: int
    r: float  # NaN below three responses, or if a measure is constant
    # 2.5 % and 97.5 % quantiles of the bootstrap; NaN if it has fewer than MIN_DRAWN prompts to
    # draw from
    low: float
    high: float


def check_measures(names: Sequence[str]) -> tuple[str, ...]:
    """The names that are metrics and no measures of a study; UserError for an unknown one."""
    known = [*RESPONSE_MEASURES, *PROMPT_MEASURES, *METRICS]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else "docs/study.md lists them."
            raise UserError(f"--measure={name} is unknown; {hint}")
    return tuple(name for name in names if name in METRICS and name not in RESPONSE_MEASURES)


def correlations(measured: Measured) -> list[StudyCorrelation]:
    """PAIRS in every subset; then COUNTED, and each measure with `correct` and with `length`.

    That with `correct` is given at equal length too.
    """
    table = measured.responses
    found = []
    for x, y in PAIRS:
        if x in table and y in table:
            found += [correlation(table, x, y, subset) for subset in SUBSETS]
    if set(COUNTED) <= table.keys():
        found.append(correlation(table, *COUNTED))
    for y, subset in (("correct", "all"), ("correct", EQUAL_LENGTH), ("length", "all")):
        left_out = {*KEYS, y} | ({"length"} if subset == EQUAL_LENGTH else set())
        names = [name for name in table if name not in left_out]
        found += [correlation(table, name, y, subset) for name in names if y in table]
    return found


def correlation(
    table: dict[str, np.ndarray], x: str, y: str, subset: str = "all"
) -> StudyCorrelation:
    """The correlation of two columns.

    A draw of the bootstrap takes as many prompts as there are, with replacement, and all their
    responses: responses to one prompt are alike. With one prompt, it draws responses.

    Source: the cluster bootstrap of Davison and Hinkley 1997, Sec. 3.8; percentile intervals.
    """
    length = table.get("length", np.zeros(len(table["group_id"]))).astype(float)
    kept = subset_mask(table, subset) & ~np.isnan(table[x]) & ~np.isnan(table[y])
    prompts = np.unique(table["group_id"][kept], return_inverse=True)[1]
    num_prompts = int(prompts.max(initial=-1)) + 1
    clusters = prompts if num_prompts > 1 else np.arange(len(prompts))
    size = _unit(length[kept])
    own = [_unit(table[name][kept]) for name in (x, y)]
    columns = np.stack([*own, *(size**power for power in POWERS)], axis=1)
    counted = int(kept.sum())
    exists = counted >= MIN_RESPONSES and bool(np.all(np.abs(columns[:, :2]).max(axis=0) > 0))
    if not exists:
        return StudyCorrelation(x, y, subset, counted, num_prompts, *[math.nan] * 3)
    sums = np.zeros((clusters.max() + 1, *[columns.shape[1] + 1] * 2))
    rows = np.concatenate([np.ones((len(columns), 1)), columns], axis=1)
    np.add.at(sums, clusters, rows[:, :, None] * rows[:, None, :])
    random = np.random.default_rng(zlib.crc32(f"{x} {y} {subset}".encode()))
    moments = [sums.sum(axis=0)[None]]
    size = max(_DRAWN_AT_ONCE // len(sums), 1)
    for number in (min(size, NUM_DRAWS - first) for first in range(0, NUM_DRAWS, size)):
        drawn = random.integers(len(sums), size=(number, len(sums)))
        drawn += len(sums) * np.arange(number)[:, None]
        times = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
        moments.append(np.tensordot(times.astype(float), sums, axes=1))
    moments = np.concatenate(moments)
    values = _pearson(moments, partial=subset == EQUAL_LENGTH)
    low, high = interval(values[1:]) if len(sums) >= MIN_DRAWN else (math.nan, math.nan)
    return StudyCorrelation(x, y, subset, counted, num_prompts, float(values[0]), low, high)


def subset_mask(table: dict[str, np.ndarray], subset: str) -> Bool[np.ndarray, " B"]:
    """The responses of a subset; none if they are not known."""
    if subset in ("correct", "wrong"):
        correct = table.get("correct", np.full(len(table["group_id"]), math.nan))
        return correct == (subset == "correct")
    if subset in LENGTHS:
        # Ties stay in one third, so that equal lengths are never split.
        edges = np.quantile(table["length"], [1 / 3, 2 / 3])
        return np.searchsorted(edges, table["length"]) == LENGTHS.index(subset)
    return np.ones(len(table["group_id"]), bool)


def _unit(values: Float[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
    """Centred and scaled, so that sums of squares lose no digits; zeros if constant."""
    if not len(values):
        return values
    centred = values - values.mean()
    scale = np.abs(centred).max()
    # A centred constant consists of the rounding errors of float32.
    return centred / scale if scale > 1e-6 * np.abs(values).max() else 0 * centred


def _pearson(moments: Float[np.ndarray, "N K K"], *, partial: bool) -> Float[np.ndarray, " N"]:
    """Correlation of columns 1 and 2 from sums of products with (1, x, y, powers of the length)."""
    means = moments[:, :1, 1:] / moments[:, :1, :1]
    covariance = moments[:, 1:, 1:] / moments[:, :1, :1] - means * means.transpose(0, 2, 1)
    own, with_length = covariance[:, :2, :2], covariance[:, :2, 2:]
    variance = np.diagonal(own, axis1=1, axis2=2)
    # The columns are at most 1, so less is the rounding of a draw whose values are all equal.
    exists = np.all(variance > 1e-14, axis=1)
    if partial:
        # Fewer different lengths than powers leave a part of them without a variance.
        inverse = np.linalg.pinv(covariance[:, 2:, 2:], rcond=1e-10, hermitian=True)
        own = own - with_length @ inverse @ with_length.transpose(0, 2, 1)
        rest = np.diagonal(own, axis1=1, axis2=2)
        exists &= np.prod(np.maximum(rest, 0.0), axis=1) > 1e-12 * np.prod(variance, axis=1)
        variance = rest
    scale = np.sqrt(np.where(exists, np.prod(variance, axis=1), math.nan))
    return np.clip(own[:, 0, 1] / scale, -1.0, 1.0)


def summary(measured: Measured, found: Sequence[StudyCorrelation], source: str) -> Group:
    """The study on one screen: measures by correctness, and the correlations of PAIRS."""
    table = measured.responses
    correct = table.get("correct", np.full(len(table["group_id"]), math.nan))
    known = ~np.isnan(correct)
    title = f"{len(correct)} responses to {len(measured.prompts['group_id'])} prompts"
    if known.any():
        title += f", {correct[known].mean():.1%} correct"
    means = _table(["measure", "mean", "correct", "wrong", "r with length", "r with correct"])
    by_pair = {(c.x, c.y, c.subset): c for c in found}
    present = [n for n in table if n not in KEYS and not np.isnan(table[n].astype(float)).all()]
    for name in present[:_IN_SUMMARY]:
        parts = (np.ones(len(correct), bool), correct == 1, correct == 0)
        others = (by_pair.get((name, other, "all")) for other in ("length", "correct"))
        means.add_row(
            _NARROW.get(name, short(name)),
            *(_number(table[name][part]) for part in parts),
            *("" if c is None else with_interval(c, empty="") for c in others),
        )
    pairs = [pair for pair in PAIRS if not math.isnan(_r(by_pair.get((*pair, "all"))))]
    lines = [Text(f"{source}: {title}"), means]
    if pairs:
        names = (f"{_NARROW.get(x, short(x))}, {short(y)}" for x, y in pairs)
        by_subset = _table(["r, 95 % interval", "prompts", *names])
        for subset in SUBSETS:
            of_subset = [by_pair[(*pair, subset)] for pair in pairs]
            by_subset.add_row(
                subset,
                str(max(c.num_prompts for c in of_subset)),
                *(with_interval(c, empty="-") for c in of_subset),
            )
        lines.append(by_subset)
    missing = [name for name in (*table, *measured.prompts) if _all_missing(measured, name)]
    if missing:
        lines.append(Text(f"not known here: {', '.join(missing)}"))
    return Group(*lines)


def _table(header: Sequence[str]) -> Table:
    table = Table(*header, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False)
    for index, column in enumerate(table.columns):
        column.justify = "right" if index else "left"
        column.no_wrap = True
    return table


def _r(found: StudyCorrelation | None) -> float:
    return math.nan if found is None else found.r


def _all_missing(measured: Measured, name: str) -> bool:
    tables = [table for table in (measured.responses, measured.prompts) if name in table]
    return all(np.isnan(table[name].astype(float)).all() for table in tables)


def with_interval(c: StudyCorrelation, *, empty: str) -> str:
    """Such as "0.31 [0.12,0.47]"; without an interval that is not known."""
    if math.isnan(c.r):
        return empty
    r, low, high = (f"{value + 0.0:.2f}".replace("-0.00", "0.00") for value in c[-3:])
    return r if math.isnan(c.low) else f"{r} [{low},{high}]"


def short(name: str) -> str:
    """The name in tables and pictures."""
    return dict(zip(RANKS, ("ER", "ERV", "ERA"))).get(name, name.replace("_", " "))


def _number(values: Float[np.ndarray, " _"]) -> str:
    found = values[~np.isnan(values)]
    return f"{found.mean():.3g}" if len(found) else "-"
