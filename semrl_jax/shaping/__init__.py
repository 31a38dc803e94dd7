"""Pure maps from advantages and metrics to shaped advantages."""

from semrl_jax.shaping.options import INDICATORS, ShapingOptions
from semrl_jax.support.lazy import lazy_names

# Loaded at their first use: the options are checked before JAX is loaded.
_ADVANTAGES = ("Signal", "compute_signal", "reward_bonus", "shape_advantages")
_STATE = ("ShapingState", "init_shaping_state", "update_shaping_state")
_LAZY = dict.fromkeys(_ADVANTAGES, "advantages") | dict.fromkeys(_STATE, "baselines")
__all__ = ["INDICATORS", "ShapingOptions", *_LAZY]
__getattr__ = lazy_names(__name__, _LAZY)
