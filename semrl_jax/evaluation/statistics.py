"""Figures of a benchmark from values per problem: mean and standard error."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from semrl_jax.evaluation.interface import PerProblem


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


def _weighted(figure: PerProblem) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, " P"]]:
    """Values, 0 where the weight is 0, and weights."""
    values = np.asarray(figure.values, np.float64)
    weights = np.ones_like(values) if figure.weights is None else np.asarray(figure.weights, float)
    return np.where(weights > 0, values, 0.0), weights
