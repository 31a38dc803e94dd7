"""Train state, jitted update, checkpoints and the loop."""

from semrl_jax.training.config import validate
from semrl_jax.training.loop import EXIT_PREEMPTED, train, warm_start

__all__ = ["EXIT_PREEMPTED", "train", "validate", "warm_start"]
