"""Figures of a benchmark from values per problem: mean, standard error, bootstrap intervals."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from semrl_jax.evaluation.protocols import PerProblem

NUM_DRAWS = 2000  # of a bootstrap; the bounds then vary by about 3 % of the interval
LEVEL = 0.95
_DRAWS_AT_ONCE = 200  # bounds the memory of benchmarks with many problems
_EQUAL = 1e-12  # differences below it are rounding


def mean(figure: PerProblem) -> float:
    """The weighted mean; NaN if no problem has a weight."""
    values, weights = _weighted(figure)
    total = weights.sum()
    return float(values @ weights / total) if total else math.nan


def standard_error(figure: PerProblem) -> float:
    """The standard error of the mean over problems, as draws from a population of problems.

    For a ratio of sums it is the linear approximation, sqrt(sum(w^2 (v - mean)^2)) / sum(w). With
    equal weights it is the standard deviation (divided by P, not P - 1) over sqrt(P). NaN if no
    problem has a weight.
    """
    values, weights = _weighted(figure)
    total = weights.sum()
    if not total:
        return math.nan
    deviations = weights * (values - mean(figure))
    return float(np.sqrt(deviations @ deviations) / total)


class Difference(NamedTuple):
    """A figure of one policy less that of another, on the same problems."""

    difference: float  # NaN if one of the figures has no response
    interval: tuple[float, float]  # bounds of its 95 % interval
    share_above: float  # share of the draws in which the first policy has the higher figure


def bootstrap(
    figures: Mapping[str, PerProblem], benchmark: str
) -> dict[str, Float[np.ndarray, " draws"]]:
    """Draws of the figures of one benchmark, for intervals.

    Each of NUM_DRAWS draws takes as many problems as there are, with replacement, and computes all
    figures from them. A draw without a response is NaN.

    The random seed is a function of the name of the benchmark. Draws of two policies on one
    benchmark hence take the same problems, so their difference is a draw of a paired bootstrap.
    Draws of two benchmarks are independent, so their mean is a draw of the average.

    Args:
      figures: values of the same P problems in the same order.
      benchmark: its name.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993; percentile intervals.
    """
    if not figures:
        return {}
    values, weights = map(np.stack, zip(*map(_weighted, figures.values())))  # [F, P]
    num_problems = values.shape[1]
    if not num_problems:
        return {name: np.full(NUM_DRAWS, math.nan) for name in figures}
    random = np.random.default_rng(zlib.crc32(benchmark.encode(errors="replace")))
    sums = np.concatenate([weights * values, weights]).T  # [P, 2 F]
    found = []
    for first in range(0, NUM_DRAWS, _DRAWS_AT_ONCE):
        size = min(_DRAWS_AT_ONCE, NUM_DRAWS - first)
        problems = random.integers(num_problems, size=(size, num_problems))
        problems += num_problems * np.arange(size)[:, None]
        times = np.bincount(problems.ravel(), minlength=size * num_problems)
        found.append(times.reshape(size, num_problems) @ sums)
    above, below = np.split(np.concatenate(found).T, 2)  # [F, draws]
    draws = np.where(below > 0, above / np.where(below > 0, below, 1.0), math.nan)
    return dict(zip(figures, draws))


def interval(draws: Float[np.ndarray, " draws"]) -> tuple[float, float]:
    """The 2.5 % and the 97.5 % quantile of the draws that are numbers; NaN if there is none."""
    found = draws[~np.isnan(draws)]
    if not len(found):
        return math.nan, math.nan
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def difference(
    value: float,
    draws: Float[np.ndarray, " draws"],
    other: float,
    others: Float[np.ndarray, " draws"],
) -> Difference:
    """The paired bootstrap of two policies from their figures and their draws by `bootstrap`."""
    found = draws - others
    found = found[~np.isnan(found)]
    share = float(np.mean(found > _EQUAL)) if len(found) else math.nan
    return Difference(value - other, interval(found), share)


def _weighted(figure: PerProblem) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, " P"]]:
    """Values, 0 where the weight is 0, and weights."""
    values = np.asarray(figure.values, np.float64)
    weights = np.ones_like(values) if figure.weights is None else np.asarray(figure.weights, float)
    return np.where(weights > 0, values, 0.0), weights
