"""AdamW (arXiv:1711.05101), as in Optax."""

from __future__ import annotations

import dataclasses

import optax

from semrl_jax.training.optimizers import with_rounded


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of the optimiser."""

    adam_b1: float = 0.9  # decay of the mean of gradients
    adam_b2: float = 0.999  # decay of the mean of squared gradients, which is float32
    first_moment_dtype: str = "float32"  # of the mean of gradients, "float32" or "bfloat16"


def direction(options: Options) -> optax.GradientTransformation:
    """The mean of gradients over the root of the mean of squares, both corrected for the start."""
    adam = optax.scale_by_adam(b1=options.adam_b1, b2=options.adam_b2)
    return with_rounded("mu", options.first_moment_dtype, adam)
