"""RLOO: the baseline of a response is the mean reward of the others in its group.

A_i = r_i - mean of r_j over j != i = (r_i - mean) G / (G - 1)

Source: arXiv:2402.14740.
"""

from __future__ import annotations

import numpy as np

from semrl_jax.algorithms.groups import by_size, centred, per_other
from semrl_jax.algorithms.kl_reward import KLReward as Options
from semrl_jax.algorithms.kl_reward import first_state, less_kl, next_state
from semrl_jax.algorithms.objective import group_needs as needs
from semrl_jax.algorithms.objective import loss, token_weights
from semrl_jax.algorithms.turn_credit import each_turn

__all__ = [
    "Options", "advantages", "first_state", "loss", "needs", "next_state", "token_weights",
]  # fmt: skip


@less_kl
@each_turn
def advantages(rewards, lengths, options):
    def factor(size):
        return float(np.float32(size) * np.float32(per_other(size)))

    return centred(rewards, lengths) * by_size(factor, rewards, lengths)
