"""Accuracy by type of problem, such as "Algebra"."""

from __future__ import annotations

from collections.abc import Sequence

import ml_collections
import numpy as np

from semrl_jax.evaluation.protocols import PerProblem
from semrl_jax.evaluation.repeated import correct_counts, plan
from semrl_jax.evaluation.samples import Sample

__all__ = ["per_problem", "plan"]


def per_problem(
    problems: Sequence[Sequence[Sample]], options: ml_collections.ConfigDict
) -> dict[str, PerProblem]:
    """`accuracy/<type>` over all samples, in [0, 1]; none of a benchmark without types."""
    sizes = np.array([len(samples) for samples in problems], float)
    values = correct_counts(problems) / np.maximum(sizes, 1)
    types = np.array([samples[0].problem_type if samples else "" for samples in problems])
    return {
        f"accuracy/{name}": PerProblem(values, sizes * (types == name), with_error=True)
        for name in sorted({*types.tolist()} - {""})
    }
