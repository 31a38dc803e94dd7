"""Mathematical equality of answers by the rules of `grading`, scored by `rewards.mode`."""

from __future__ import annotations

from semrl_jax.rewards.grading import grade, prepare
from semrl_jax.rewards.verdict import Verdict, VerifierSettings, verdict_score

__all__ = ["prepare", "verify"]


def verify(response: str, reference: str, settings: VerifierSettings) -> Verdict:
    """Scores a response, as `grade`; `mode` and `unboxed_penalty` decide, see `verdict_score`."""
    graded = grade(response, reference)
    return Verdict(verdict_score(graded.correct, graded.boxed, settings), *graded)
