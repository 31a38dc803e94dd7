"""Positive and negative samples with fixed weights: PSR, NSR and weighted REINFORCE.

A = positive_weight if r > threshold, else -negative_weight

PSR: weights 1 and 0. NSR: 0 and 1. Weighted REINFORCE: 0.1 and 1, the defaults. No group, no
baseline: one response per prompt is enough.

Source: arXiv:2506.01347. Its code removes the samples of weight 0 before the mean over tokens; here
they stay in the mean and add 0.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.algorithm import Needs, Passes, check_options
from semrl_jax.algorithms.groups import broadcast_to_tokens
from semrl_jax.algorithms.objective import Objective, loss, token_weights

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]


@dataclasses.dataclass(frozen=True)
class Options(Objective):
    """Weights, not negative; `threshold` in the unit of the rewards."""

    positive_weight: float = 0.1
    negative_weight: float = 1.0
    threshold: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_options(
            self,
            positive_weight=(self.positive_weight >= 0, "be at least 0"),
            negative_weight=(
                self.negative_weight >= 0 and self.positive_weight + self.negative_weight > 0,
                "be at least 0, and above 0 if positive_weight is 0",
            ),
        )


def needs(options: Options) -> Needs:
    return options.needs()


def advantages(
    rewards: Float[Array, "P G"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
) -> Float[Array, "B T"]:
    positive = rewards > options.threshold
    estimates = jnp.where(positive, options.positive_weight, -options.negative_weight)
    return broadcast_to_tokens(estimates, response_mask)
