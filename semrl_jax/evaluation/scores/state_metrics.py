"""The metrics of hidden states by correctness; nothing without `evaluation.metrics`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_collections

from semrl_jax.evaluation.protocols import PerProblem
from semrl_jax.evaluation.repeated import over_responses, plan
from semrl_jax.evaluation.samples import Sample

__all__ = ["per_problem", "plan"]

KINDS = {"mean": (True, False), "correct": (True,), "incorrect": (False,)}


def per_problem(
    problems: Sequence[Sequence[Sample]], options: ml_collections.ConfigDict
) -> dict[str, PerProblem]:
    """Means of each metric, `metrics/<label>/mean`, `/correct` and `/incorrect`, where valid."""
    labels = {label for samples in problems for sample in samples for label in sample.metrics}

    def mean(label: str, wanted: tuple[bool, ...]) -> PerProblem:
        return over_responses(
            problems,
            lambda sample: sample.metrics[label],
            lambda sample: (
                sample.correct in wanted and math.isfinite(sample.metrics.get(label, math.nan))
            ),
        )

    return {
        f"metrics/{label}/{kind}": mean(label, wanted)
        for label in sorted(labels)
        for kind, wanted in KINDS.items()
    }
