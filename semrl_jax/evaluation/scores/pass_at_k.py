"""pass@k: the probability that at least one of k sampled responses is correct."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_collections
import numpy as np

from semrl_jax.evaluation.protocols import PerProblem
from semrl_jax.evaluation.repeated import correct_counts, plan, subset_sizes
from semrl_jax.evaluation.samples import Sample

__all__ = ["per_problem", "plan"]


def per_problem(
    problems: Sequence[Sequence[Sample]], options: ml_collections.ConfigDict
) -> dict[str, PerProblem]:
    """`pass@<k>` in [0, 1] for each k of `evaluation.k`; UserError for fewer than k samples."""
    counts = [(len(s), c) for s, c in zip(problems, correct_counts(problems).tolist())]
    return {
        f"pass@{k}": PerProblem(
            np.array([pass_at_k(n, c, k) for n, c in counts], float), with_error=True
        )
        for k in subset_sizes(problems, options)
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The unbiased estimate from n >= k samples, c of them correct: 1 - C(n - c, k) / C(n, k).

    Source: arXiv:2107.03374, Eq. 1.
    """
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
