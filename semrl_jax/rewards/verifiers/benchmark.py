"""Answers of benchmarks: 1 if the answer equals the reference by the rules of `grading`, else 0.

`rewards.mode` has no influence. The row of the prompt may have the keys of `grading.grade`, and may
lack all.

Source: the evaluation protocol of the reference implementation (hf618/VERL, 3de68f1). Departures:
exact numbers must be equal exactly, factors of 100 need a percent sign or `percent`, and equality
of expressions is shown by their values, not by `simplify`, whose time has no bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semrl_jax.rewards.grading import grade, prepare
from semrl_jax.rewards.verdict import Verdict, VerifierSettings

__all__ = ["prepare", "verify"]


def verify(
    response: str, reference: str, settings: VerifierSettings, row: Mapping[str, Any] | None = None
) -> Verdict:
    """Scores a response, as `grade`."""
    graded = grade(response, reference, row)
    return Verdict(float(graded.correct), *graded)
