"""RLOO: the baseline of a response is the mean reward of the others in its group.

A_i = r_i - mean of r_j over j != i = (r_i - mean) G / (G - 1)

Source: arXiv:2402.14740.
"""

from __future__ import annotations

from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.algorithm import Passes
from semrl_jax.algorithms.groups import broadcast_to_tokens, centred
from semrl_jax.algorithms.objective import Objective as Options
from semrl_jax.algorithms.objective import group_needs as needs
from semrl_jax.algorithms.objective import loss, token_weights

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]


def advantages(
    rewards: Float[Array, "P G"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
) -> Float[Array, "B T"]:
    size = rewards.shape[1]
    return broadcast_to_tokens(centred(rewards) * size / (size - 1), response_mask)
