"""The score pass@k: the probability that one of k sampled responses is correct.

    python -m launch.train --config=configs/quickstart.py --workdir=runs/quickstart \
      --config.evaluation.scores=greedy --config.evaluation.scores=benchmarks.pass_at_k

Eight responses per problem are sampled from the unmodified policy, at temperature 1.
"""

import math

import numpy as np

from semrl_jax.evaluation.interface import PerProblem, Plan

NUM_SAMPLES = 8


def plan(options):
    return Plan(num_samples=NUM_SAMPLES, temperature=1.0)


def per_problem(problems, options):
    """`pass_at_<k>` in [0, 1], for k = 1, 2, 4, 8."""
    correct = [sum(sample.correct for sample in samples) for samples in problems]
    return {
        f"pass_at_{k}": PerProblem(np.array([pass_at_k(NUM_SAMPLES, c, k) for c in correct]))
        for k in (1, 2, 4, 8)
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The unbiased estimate from n >= k samples, c of them correct: 1 - C(n - c, k) / C(n, k).

    Source: arXiv:2107.03374, Eq. 1.
    """
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
