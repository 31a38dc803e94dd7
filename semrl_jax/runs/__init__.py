"""A run: its directory, its processes, its life from the first check to the last report."""

from semrl_jax.runs.config_checks import validate
from semrl_jax.support.lazy import lazy_names

__all__ = ["EXIT_PREEMPTED", "fine_tune", "train", "validate", "warm_start"]

# A config is checked before JAX is loaded.
__getattr__ = lazy_names(
    __name__,
    dict.fromkeys(("EXIT_PREEMPTED", "train", "warm_start"), "lifecycle")
    | {"fine_tune": "sft_run"},
)
