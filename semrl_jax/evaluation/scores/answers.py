"""How different the answers to a problem are: their entropy, and their number.

Source: Wu et al., The Invisible Leash, arXiv:2507.14843, which finds that the entropy of answers
falls in training, also where that of tokens rises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import ml_collections
import numpy as np

from semrl_jax.evaluation.protocols import PerProblem
from semrl_jax.evaluation.repeated import plan
from semrl_jax.evaluation.samples import Sample
from semrl_jax.rewards.grading.text import answer_class

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
    shares = [_shares(samples) for samples in problems]
    weights = np.array([float(len(found) > 0) for found in shares])
    # + 0.0: no "-0.0"
    entropies = np.array([-found @ np.log(found) + 0.0 for found in shares])
    numbers = np.array([float(len(found)) for found in shares])
    return {
        "responses/answer_entropy": PerProblem(entropies, weights),
        "responses/distinct_answers": PerProblem(numbers, weights),
    }


def _shares(samples: Sequence[Sample]) -> np.ndarray:
    """[number of answers]; "0.5" and "1/2" are two."""
    counts = Counter(filter(None, (answer_class(sample.extracted) for sample in samples)))
    found = np.array(list(counts.values()), float)
    return found / max(found.sum(), 1.0)
