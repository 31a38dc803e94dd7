"""MaxRL: the first terms of the gradient of the log-likelihood of a correct response.

A = (r - mean) / mean; 0.0 in a group whose mean reward is not above 0

grad log p = sum over k of (1 / k) grad pass@k; a group of G rewards 0 or 1 gives its first G - 1
terms without bias. Hard problems weigh more: |A| is up to G - 1. A reward below 0 ends the run.

Source: arXiv:2602.02710.

Its estimator without a baseline, r / mean, gives one term more, with a
larger variance; the baseline takes that term away, since groups without a correct response have
none.
"""

from __future__ import annotations

import jax.numpy as jnp

from semrl_jax.algorithms.algorithm import Needs
from semrl_jax.algorithms.groups import centred, group_mean
from semrl_jax.algorithms.objective import Objective as Options
from semrl_jax.algorithms.objective import group_needs, loss, token_weights
from semrl_jax.algorithms.turn_credit import each_turn

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]


def needs(options: Options) -> Needs:
    return group_needs(options)._replace(positive_rewards=True)


@each_turn
def advantages(rewards, lengths, options):
    mean, differences = group_mean(rewards, lengths), centred(rewards, lengths)
    return jnp.where(mean > 0, differences / jnp.where(mean > 0, mean, 1.0), 0.0)
