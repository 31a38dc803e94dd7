"""PACS: the policy learns to predict the rewards of a group, 0 or 1, from its log-probabilities.

psi_i = b (s_i - mean of s_j over j != i), s = sum over tokens of old_logprobs - ref_logprobs

L = mean over i of w_i (-y_i log sigmoid(psi_i) - (1 - y_i) log sigmoid(-psi_i)), y_i is 1 if r_i >
threshold, else 0

A_i = b G / (G - 1) (e_i - mean e), e_i = w_i (y_i - sigmoid(psi_i)); b is `reward_beta`

This is the gradient of L in the first update on a batch, with `surrogate="reinforce"` and
`aggregation="constant_length"`, which sums over tokens. In a group with correct and incorrect
responses, w gives both the same weight in total; else it is 1.

Source: arXiv:2509.02522, Eqs. 6 to 8 and its code; b there is 1 or 2.

Its code takes the policy at the start of each step as the reference, so that psi is 0 in the first
update of a step; here the reference stays.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from semrl_jax.algorithms import implicit_reward
from semrl_jax.algorithms.algorithm import Needs
from semrl_jax.algorithms.groups import centred, per_other
from semrl_jax.algorithms.implicit_reward import ImplicitReward, each_response
from semrl_jax.algorithms.objective import loss, token_weights
from semrl_jax.support.fields import setting

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]


@dataclasses.dataclass(frozen=True)
class Options(ImplicitReward):
    """Own options; see `ImplicitReward` for the others."""

    threshold: float = setting(0.0, "rewards above are positive")


def needs(options: Options) -> Needs:
    return implicit_reward.needs(options)._replace(plain_rewards=True)


@each_response
def advantages(rewards, implicit, options):
    size = rewards.shape[1]
    scale = options.reward_beta * size * per_other(size)
    psi = scale * centred(implicit)
    labels = (rewards > options.threshold).astype(jnp.float32)
    share = jnp.mean(labels, axis=1, keepdims=True)
    has_both = (share > 0) & (share < 1)
    balanced = 0.5 / jnp.where(labels > 0, share, 1 - share)
    errors = jnp.where(has_both, balanced, 1.0) * (labels - jax.nn.sigmoid(psi))
    return scale * (errors - jnp.mean(errors, axis=1, keepdims=True))
