"""The score pass@k: the probability that one of k sampled responses is correct.

    python -m launch.train --config=configs/quickstart.py --workdir=runs/quickstart \
      --config.evaluation.scores=greedy --config.evaluation.scores=benchmarks.pass_at_k

Eight responses per problem are sampled from the unmodified policy, at temperature 1.
"""

import numpy as np

from semrl_jax.evaluation.protocols import PerProblem, Plan
from semrl_jax.evaluation.scores.pass_at_k import pass_at_k

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
