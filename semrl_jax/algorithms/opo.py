"""OPO: the baseline of a group weighs its rewards by the lengths of the responses.

A_i = r_i - (sum_j L_j r_j) / (sum_j L_j), L_j the number of tokens of response j

It has the least variance if the squared norm of a response's gradient grows with its length.

Source: arXiv:2505.23585.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.algorithm import Passes
from semrl_jax.algorithms.groups import centred, first_reward
from semrl_jax.algorithms.kl_reward import KLReward as Options
from semrl_jax.algorithms.kl_reward import first_state, less_kl, next_state
from semrl_jax.algorithms.objective import group_needs as needs
from semrl_jax.algorithms.objective import loss, token_weights
from semrl_jax.algorithms.turn_credit import by_turn

__all__ = [
    "Options", "advantages", "first_state", "loss", "needs", "next_state", "token_weights",
]  # fmt: skip


@less_kl
def advantages(
    rewards: Float[Array, "P G *tokens"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
) -> Float[Array, "B T"]:
    def estimate(rewards, lengths):
        # Less some reward of the group first: the baseline of equal rewards is exact then.
        first = first_reward(rewards, lengths)
        if lengths is None:
            lengths = jnp.sum(response_mask, axis=1, dtype=jnp.float32).reshape(rewards.shape)
        total = jnp.maximum(jnp.sum(lengths, axis=1, keepdims=True), 1.0)
        baseline = first + jnp.sum(lengths * (rewards - first), axis=1, keepdims=True) / total
        return centred(rewards, baseline=baseline)

    return by_turn(estimate, rewards, response_mask, passes.spans)
