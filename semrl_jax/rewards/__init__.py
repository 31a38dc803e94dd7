"""Verifiers from (response text, reference answer) to a reward; plain Python, no JAX."""

from semrl_jax.rewards.pool import VerifierPool
from semrl_jax.rewards.verdict import Verdict, VerifierSettings

__all__ = ["Verdict", "VerifierPool", "VerifierSettings"]
