"""Online DPO: the best response of a group is preferred to the worst.

L = -log sigmoid(b (s_best - s_worst)), s = sum over its tokens of old_logprobs - ref_logprobs

A = b sigmoid(-b (s_best - s_worst)) for the best response, -A for the worst, 0 for the others and
in groups of equal rewards; b is `reward_beta`

This is the gradient of L in the first update on a batch, with `surrogate="reinforce"` and
`aggregation="constant_length"`, which sums over tokens.

Source: arXiv:2305.18290, Eq. 7, b = 0.1; arXiv:2402.04792 for pairs of the current policy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from semrl_jax.algorithms.implicit_reward import ImplicitReward as Options
from semrl_jax.algorithms.implicit_reward import each_response, needs
from semrl_jax.algorithms.objective import loss, token_weights

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]


@each_response
def advantages(rewards, implicit, options):
    size = rewards.shape[1]
    best, worst = (
        jax.nn.one_hot(index, size) for index in (rewards.argmax(axis=1), rewards.argmin(axis=1))
    )
    sign = best - worst  # zeros where all are equal: both are the first
    margin = jnp.sum(sign * implicit, axis=1, keepdims=True)
    return options.reward_beta * jax.nn.sigmoid(-options.reward_beta * margin) * sign
