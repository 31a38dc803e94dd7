"""Pure maps from advantages and metrics to shaped advantages."""

from semrl_jax.shaping.advantages import Signal, compute_signal, reward_bonus, shape_advantages
from semrl_jax.shaping.options import (
    EXPLOIT_WEIGHTS,
    EXPLORE_WEIGHTS,
    GUIDANCE,
    INDICATORS,
    KNOWN_INDICATORS,
    ShapingOptions,
    validate_shaping,
)
from semrl_jax.shaping.state import ShapingState, init_shaping_state, update_shaping_state

__all__ = [
    "EXPLOIT_WEIGHTS",
    "EXPLORE_WEIGHTS",
    "GUIDANCE",
    "INDICATORS",
    "KNOWN_INDICATORS",
    "ShapingOptions",
    "ShapingState",
    "Signal",
    "compute_signal",
    "init_shaping_state",
    "reward_bonus",
    "shape_advantages",
    "update_shaping_state",
    "validate_shaping",
]
