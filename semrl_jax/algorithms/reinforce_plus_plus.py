"""REINFORCE++: rewards of all prompts, less a KL per token, whitened over the batch.

x_t = r at the last token, 0 elsewhere, less kl_reward_coefficient KL_t

A_t = (R_t - mean) / sqrt(variance + 1e-8), R_t the sum of x from t on, mean and variance over all
tokens of the batch

With `group_baseline`, the mean of its group is first subtracted from r ("REINFORCE++-baseline").

Source: arXiv:2501.03262.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.algorithm import Needs, Passes
from semrl_jax.algorithms.gae import whiten
from semrl_jax.algorithms.groups import centred
from semrl_jax.algorithms.kl_reward import KLReward, first_state, next_state, token_rewards
from semrl_jax.algorithms.objective import loss, token_weights
from semrl_jax.algorithms.turn_credit import by_turn, returns_to_go
from semrl_jax.support.fields import setting

__all__ = [
    "Options", "advantages", "first_state", "loss", "needs", "next_state", "token_weights",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options(KLReward):
    """Own options; see `KLReward` for the others."""

    group_baseline: bool = setting(False, "subtract the group's mean first")


def needs(options: Options) -> Needs:
    return options.needs()._replace(groups=options.group_baseline)


def advantages(
    rewards: Float[Array, "P G *tokens"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
    **state: Any,
) -> Float[Array, "B T"]:
    compared = None
    if options.group_baseline and rewards.ndim == 2:
        rewards = centred(rewards)
    elif options.group_baseline:
        compared = by_turn(centred, rewards, response_mask, passes.spans)
        rewards = jnp.zeros_like(rewards)
    returns = returns_to_go(token_rewards(rewards, passes, response_mask, options, **state))
    if compared is not None:
        returns = returns + compared
    return jax.lax.stop_gradient(whiten(returns, response_mask))
