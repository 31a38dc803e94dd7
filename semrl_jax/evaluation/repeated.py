"""What the scores of n sampled responses per problem share: their plan, and small sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_collections
import numpy as np
from jaxtyping import Float, Int

from semrl_jax.evaluation.protocols import PerProblem, Plan
from semrl_jax.evaluation.samples import NOT_SAMPLED, Sample
from semrl_jax.support.errors import UserError
from semrl_jax.types import distribution_of


def plan(options: ml_collections.ConfigDict) -> Plan:
    """The sampling that `config.evaluation` sets, so that these scores share their responses."""
    return Plan(num_samples=options.n, **distribution_of(options))


def num_samples(problems: Sequence[Sequence[Sample]]) -> int:
    """n, the number of samples per problem. Of unequal numbers it is the largest."""
    return max(map(len, problems), default=0)


def subset_sizes(
    problems: Sequence[Sequence[Sample]], options: ml_collections.ConfigDict
) -> tuple[int, ...]:
    """The values of `evaluation.k`, each once, ascending; UserError for one above the samples."""
    fewest = min(map(len, problems), default=None)
    for k in options.k:
        if k < 1 or (fewest is not None and k > fewest):
            raise UserError(
                f"evaluation.k={k} must be from 1 to the {fewest} samples of a problem."
            )
    return tuple(sorted(set(options.k)))


def sizes_above_one(
    problems: Sequence[Sequence[Sample]], options: ml_collections.ConfigDict
) -> tuple[int, ...]:
    """`subset_sizes` without 1, for scores that choose among responses; n if that leaves none."""
    sizes = tuple(k for k in subset_sizes(problems, options) if k > 1)
    fewest = min(map(len, problems), default=1)
    return sizes or ((fewest,) if fewest > 1 else ())


def correct_counts(problems: Sequence[Sequence[Sample]]) -> Int[np.ndarray, " P"]:
    """The number of correct samples of each problem."""
    return np.array([sum(bool(s.correct) for s in samples) for samples in problems], int)


def over_responses(
    problems: Sequence[Sequence[Sample]],
    value: Callable[[Sample], float],
    counts: Callable[[Sample], bool] = lambda sample: True,
) -> PerProblem:
    """The mean over all sampled responses that count; the weight of a problem is their number."""
    values, weights = np.zeros(len(problems)), np.zeros(len(problems))
    for place, samples in enumerate(problems):
        found = [value(s) for s in samples if s.finish_reason != NOT_SAMPLED and counts(s)]
        if found:
            values[place], weights[place] = np.mean(found), len(found)
    return PerProblem(values, weights)


def log_factorials(largest: int) -> Float[np.ndarray, " N"]:
    """log i! for i = 0, ..., largest."""
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, largest + 1)))])
