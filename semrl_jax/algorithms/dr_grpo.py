"""Dr. GRPO: rewards less the mean of the group, without the deviation.

A = r - mean

With `aggregation="constant_length"` and `constant_length` tokens, the limit of a response, the
weight of a token depends neither on the spread of the rewards nor on the length of the response.

Source: arXiv:2503.20783.
"""

from __future__ import annotations

from semrl_jax.algorithms.groups import centred
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
    return centred(rewards, lengths)
