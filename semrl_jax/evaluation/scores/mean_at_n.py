"""mean@n and any@n: the accuracy over all samples, and the share of problems solved by any."""

from __future__ import annotations

from collections.abc import Sequence

import ml_collections
import numpy as np

from semrl_jax.evaluation.protocols import PerProblem
from semrl_jax.evaluation.repeated import correct_counts, num_samples, plan
from semrl_jax.evaluation.samples import Sample

__all__ = ["per_problem", "plan"]


def per_problem(
    problems: Sequence[Sequence[Sample]], options: ml_collections.ConfigDict
) -> dict[str, PerProblem]:
    """`mean@<n>` and `any@<n>` (pass@n) in [0, 1]; `acc` and `pass_acc` of the release."""
    correct, n = correct_counts(problems), num_samples(problems)
    sizes = np.array([len(samples) for samples in problems], float)
    return {
        f"mean@{n}": PerProblem(correct / np.maximum(sizes, 1), sizes, with_error=True),
        f"any@{n}": PerProblem((correct > 0).astype(float), with_error=True),
    }
