"""Positive and negative samples with fixed weights: PSR, NSR and weighted REINFORCE.

A = positive_weight if r > threshold, else -negative_weight

PSR: weights 1 and 0. NSR: 0 and 1. Weighted REINFORCE: 0.1 and 1, the defaults.

Source: arXiv:2506.01347.

Its code removes the samples of weight 0 before the mean over tokens; here they stay in the mean and
add 0.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from semrl_jax.algorithms.algorithm import Needs, check_options
from semrl_jax.algorithms.objective import Objective, loss, token_weights
from semrl_jax.algorithms.turn_credit import each_turn
from semrl_jax.support.fields import setting

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]


@dataclasses.dataclass(frozen=True)
class Options(Objective):
    """Own options; see `Objective` for the others."""

    positive_weight: float = setting(0.1, "weight of correct responses", at_least=0)
    negative_weight: float = setting(1.0, "weight of wrong responses", at_least=0)
    threshold: float = setting(0.0, "rewards above are positive")

    def __post_init__(self):
        super().__post_init__()
        positive = self.positive_weight + self.negative_weight > 0
        check_options(self, negative_weight=(positive, "be above 0 if positive_weight is 0"))


def needs(options: Options) -> Needs:
    return options.needs()._replace(plain_rewards=True)


@each_turn
def advantages(rewards, lengths, options):
    positive = rewards > options.threshold
    return jnp.where(positive, options.positive_weight, -options.negative_weight)
