"""Pure maps from advantages and metrics to shaped advantages."""

from semrl_jax.lazy import lazy_names
from semrl_jax.shaping.options import (
    EXPLOIT_WEIGHTS,
    EXPLORE_WEIGHTS,
    GUIDANCE,
    INDICATORS,
    ShapingOptions,
)

__all__ = [
    "EXPLOIT_WEIGHTS",
    "EXPLORE_WEIGHTS",
    "GUIDANCE",
    "INDICATORS",
    "ShapingOptions",
    "ShapingState",
    "Signal",
    "compute_signal",
    "init_shaping_state",
    "reward_bonus",
    "shape_advantages",
    "update_shaping_state",
]

# The options are checked before JAX is loaded.
_STATE = ("ShapingState", "init_shaping_state", "update_shaping_state")
_ADVANTAGES = ("Signal", "compute_signal", "reward_bonus", "shape_advantages")
__getattr__ = lazy_names(
    __name__, dict.fromkeys(_ADVANTAGES, "advantages") | dict.fromkeys(_STATE, "state")
)
