"""GRPO: rewards normalised within the group.

A = (r - mean) / (std + epsilon), mean and sample standard deviation over the group

Source: arXiv:2402.03300, Sec. 4.1.
"""

from __future__ import annotations

import dataclasses

from semrl_jax.algorithms.groups import group_relative_advantages
from semrl_jax.algorithms.kl_reward import KLReward, first_state, less_kl, next_state
from semrl_jax.algorithms.objective import group_needs as needs
from semrl_jax.algorithms.objective import loss, token_weights
from semrl_jax.algorithms.turn_credit import each_turn
from semrl_jax.support.fields import setting

__all__ = [
    "Options", "advantages", "first_state", "loss", "needs", "next_state", "token_weights",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options(KLReward):
    """Own options; see `KLReward` for the others."""

    epsilon: float = setting(1e-6, "keeps a quotient finite", above=0)


@less_kl
@each_turn
def advantages(rewards, lengths, options):
    return group_relative_advantages(rewards, epsilon=options.epsilon, lengths=lengths)
