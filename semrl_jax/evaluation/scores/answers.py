"""How different the answers to a problem are: their entropy, and their number.

Source: Wu et al., The Invisible Leash, arXiv:2507.14843, which finds that the entropy of answers
falls in training, also where that of tokens rises.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_collections
import numpy as np

from semrl_jax.evaluation.protocols import PerProblem
from semrl_jax.evaluation.repeated import plan
from semrl_jax.evaluation.samples import Sample
from semrl_jax.evaluation.scores.majority import votes_of

__all__ = ["per_problem", "plan"]


def per_problem(
    problems: Sequence[Sequence[Sample]], options: ml_collections.ConfigDict
) -> dict[str, PerProblem]:
    """Means over the problems that have an answer; responses without one do not count.

    Returns:
      `responses/answer_entropy`: -sum(p log p) of the shares p of a problem's answers, in nats, at
        most log n. Like any entropy of few samples it is too low for many answers.
      `responses/distinct_answers`: the number of different answers, from 1 to n.
    """
    counts = [np.array([votes for votes, _ in votes_of(samples)], float) for samples in problems]
    shares = [found / found.sum() for found in counts]  # [number of answers] of each problem
    # + 0.0: no "-0.0"
    entropies = np.array([-found @ np.log(found) + 0.0 for found in shares])
    numbers = np.array(list(map(len, shares)), float)
    weights = (numbers > 0).astype(float)
    return {
        "responses/answer_entropy": PerProblem(entropies, weights),
        "responses/distinct_answers": PerProblem(numbers, weights),
    }
