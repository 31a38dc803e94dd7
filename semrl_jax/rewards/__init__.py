"""Verifiers from (response text, reference answer) to a reward; plain Python, no JAX."""

from semrl_jax.rewards.extraction import extract_answer, has_complete_box, normalize_answer
from semrl_jax.rewards.pool import VerifierPool
from semrl_jax.rewards.verdict import Verdict, VerifierSettings, verdict_score

__all__ = [
    "Verdict",
    "VerifierPool",
    "VerifierSettings",
    "extract_answer",
    "has_complete_box",
    "normalize_answer",
    "verdict_score",
]
