"""Adafactor (arXiv:1804.04235), from the parts of Optax: a factored mean of squared gradients."""

from __future__ import annotations

import dataclasses

import optax

from semrl_jax.training.optimizers import with_rounded


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of the optimiser."""

    decay_exponent: float = 0.8  # c, above 0; the mean of squares decays by 1 - t^-c in step t
    # Decay of the mean of the directions, in [0, 1); 0: there is none, and the state has less than
    # 0.1 bytes per parameter.
    momentum: float = 0.0
    first_moment_dtype: str = "float32"  # of that mean, "float32" or "bfloat16"
    # An array with two axes of at least this size has means of its rows and columns; any other has
    # a float32 mean per element.
    min_size_to_factor: int = 128

    def __post_init__(self):
        if not self.decay_exponent > 0:
            raise ValueError(f"decay_exponent={self.decay_exponent} must be above 0.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum} must be in [0, 1).")
        if not self.momentum and self.first_moment_dtype != "float32":
            raise ValueError(
                f"first_moment_dtype={self.first_moment_dtype!r} is of a mean that momentum=0 does "
                "not have; set momentum, such as 0.9, or leave the dtype at 'float32'."
            )


def direction(options: Options) -> optax.GradientTransformation:
    """The gradient over the root of the factored mean of squares, clipped to a mean square of 1.

    An array of stacked layers is one block of the clipping. The paper multiplies by the size of the
    parameters, and `optax.adafactor` decays weights by a rate of their own. Neither is done here:
    learning rate and weight decay mean what they mean with AdamW.
    """
    parts = [
        optax.scale_by_factored_rms(
            decay_rate=options.decay_exponent, min_dim_size_to_factor=options.min_size_to_factor
        ),
        optax.clip_by_block_rms(1.0),
    ]
    if options.momentum:
        mean = optax.ema(options.momentum, debias=False)
        parts.append(with_rounded("ema", options.first_moment_dtype, mean))
    return optax.chain(*parts)
