"""Verifiers from (response text, reference answer) to a reward; plain Python, no JAX."""

from semrl_jax.rewards.verdict import Verdict, VerifierSettings
from semrl_jax.rewards.verifier_pool import VerifierPool

__all__ = ["Verdict", "VerifierPool", "VerifierSettings"]
