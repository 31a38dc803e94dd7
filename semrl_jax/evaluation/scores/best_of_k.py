"""best@k: the accuracy of the response that a metric or a reward model selects among k.

It shows whether the effective rank, its velocity or its acceleration chooses better than chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_collections
import numpy as np
from jaxtyping import Float

from semrl_jax.evaluation.protocols import PerProblem
from semrl_jax.evaluation.repeated import correct_counts, plan, sizes_above_one
from semrl_jax.evaluation.samples import Sample

__all__ = ["per_problem", "plan"]

MEAN_LOGPROB = "mean_logprob"  # the field of Sample, chosen from like the metrics


def per_problem(
    problems: Sequence[Sequence[Sample]], options: ml_collections.ConfigDict
) -> dict[str, PerProblem]:
    """The mean over all subsets of k samples, for each k of `sizes_above_one`.

    The values chosen by are those in `Sample.metrics` (a reward model's is "reward_model") and
    `mean_logprob`. A NaN is chosen last. Equal values are chosen equally often.

    Returns:
      `best@<k>/<value>`: accuracy of the response with the highest value, in [0, 1].
      `lowest@<k>/<value>`: the same with the lowest value.
      `best@<k>/<value>/gain`, `lowest@<k>/<value>/gain`: these less the accuracy of chance, in
        [-1, 1]. Both are of the same responses, so the interval of this difference is paired.
      `best@<k>/chance`: mean accuracy.

    Raises:
      UserError: if a problem has fewer than k samples.
    """
    sizes = sizes_above_one(problems, options)
    names = sorted({name for samples in problems for sample in samples for name in sample.metrics})
    chance = correct_counts(problems) / np.maximum([len(s) for s in problems], 1)
    figures = {f"best@{k}/chance": PerProblem(chance, with_error=True) for k in sizes}
    correct = [np.array([s.correct for s in samples], float) for samples in problems]
    for name in (*names, MEAN_LOGPROB):
        values = [_values(samples, name) for samples in problems]
        for k in sizes:
            for kind, sign in (("best", 1), ("lowest", -1)):
                accuracy = np.array(
                    [best_accuracy(sign * v, c, k) for v, c in zip(values, correct)], float
                )
                figures[f"{kind}@{k}/{name}"] = PerProblem(accuracy, with_error=True)
                figures[f"{kind}@{k}/{name}/gain"] = PerProblem(accuracy - chance, with_error=True)
    return figures


def _values(samples: Sequence[Sample], name: str) -> Float[np.ndarray, " n"]:
    if name == MEAN_LOGPROB:
        return np.array([sample.mean_logprob for sample in samples], float)
    return np.array([sample.metrics.get(name, math.nan) for sample in samples], float)


def best_accuracy(
    values: Float[np.ndarray, " n"], correct: Float[np.ndarray, " n"], k: int
) -> float:
    """Expected correctness of the sample with the highest value among k of n samples.

    The samples of one value have ranks a, ..., b - 1 from below. The highest value of a subset is
    theirs with probability (C(b, k) - C(a, k)) / C(n, k), and each of them is then equally likely.
    NaN counts as the lowest value.
    """
    # np.unique sorts NaN last, as one value.
    distinct, places = np.unique(values, return_inverse=True)
    sizes = np.bincount(places, minlength=len(distinct))
    means = np.bincount(places, weights=correct, minlength=len(distinct)) / sizes
    if len(distinct) and np.isnan(distinct[-1]):
        sizes, means = np.roll(sizes, 1), np.roll(means, 1)
    n, total, rank = len(values), 0.0, 0
    for size, mean in zip(sizes.tolist(), means.tolist()):
        total += mean * (math.comb(rank + size, k) - math.comb(rank, k)) / math.comb(n, k)
        rank += size
    return total
