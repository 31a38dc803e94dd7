"""Finds where an engine and the trainer's own pass part, by layer and token, and because of what.

`observed` reads what an engine gave, `computation` repeats parts of the trainer's pass with one
thing changed, `hypotheses` are the things that may be changed, and `search` tries them.
"""

from semrl_jax.analysis.mismatch.observed import Observation, Observed, as_given, observe_rollouts
from semrl_jax.analysis.mismatch.search import Diagnosis, Finding, Weights, diagnose, segments_of

__all__ = [
    "as_given", "diagnose", "Diagnosis", "Finding", "observe_rollouts", "Observation", "Observed",
    "segments_of", "Weights",
]  # fmt: skip
