"""PPO: generalised advantages of a critic, whitened over the batch.

delta_t = x_t + gamma V_(t+1) - V_t,  a_t = delta_t + gamma gae_lambda a_(t+1)

A_t = (a_t - mean) / sqrt(variance + 1e-8), mean and variance over all tokens of the batch

x_t = r at the last token, 0 elsewhere, less kl_reward_coefficient KL_t

V_t is the critic's value before token t, and 0 after the last token. The critic learns the returns
a_t + V_t.

With `credit="turn"`, x_t has the reward of each turn at its last token, and inside a turn gamma and
gae_lambda are 1. a_t + V_t is then the return of the turn in a process whose steps are turns.

Source: arXiv:1707.06347; arXiv:1506.02438, Eq. 16; arXiv:2512.17008 (Turn-PPO), gamma 0.99 and
gae_lambda 0.9 there.

In Turn-PPO all tokens of a turn have the value before its first token as their baseline; here each
has the value before itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms import kl_reward, values
from semrl_jax.algorithms.algorithm import Needs, Passes
from semrl_jax.algorithms.gae import generalized_advantages, whiten
from semrl_jax.algorithms.kl_reward import KLReward, first_state, next_state
from semrl_jax.algorithms.objective import loss, token_weights
from semrl_jax.algorithms.turn_credit import turn_ends
from semrl_jax.algorithms.values import ValueLoss
from semrl_jax.support.fields import setting

__all__ = [
    "Options", "advantages", "first_state", "loss", "needs", "next_state", "returns",
    "token_weights", "value_loss",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options(KLReward, ValueLoss):
    """Own options; see `KLReward` and `ValueLoss` for the others."""

    gamma: float = setting(1.0, "discount per token, or per turn", within="[0, 1]")
    gae_lambda: float = setting(1.0, "lambda of the advantage estimation", within="[0, 1]")


def needs(options: Options) -> Needs:
    return options.needs()._replace(values=True)


def advantages(
    rewards: Float[Array, "P G *tokens"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
    **state: Any,
) -> Float[Array, "B T"]:
    estimates, _ = _generalized(rewards, passes, response_mask, options, **state)
    return jax.lax.stop_gradient(whiten(estimates, response_mask))


def returns(
    rewards: Float[Array, "P G *tokens"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
    **state: Any,
) -> Float[Array, "B T"]:
    return _generalized(rewards, passes, response_mask, options, **state)[1]


def _generalized(rewards, passes, response_mask, options, **state):
    token_rewards = kl_reward.token_rewards(rewards, passes, response_mask, options, **state)
    return generalized_advantages(
        token_rewards,
        passes.values,
        response_mask,
        gamma=options.gamma,
        gae_lambda=options.gae_lambda,
        ends=turn_ends(response_mask, passes.spans) if rewards.ndim == 3 else None,
    )


def value_loss(
    new_values: Float[Array, "*tokens"], *, options: Options, **arrays: Array
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """See `values.value_loss`."""
    return values.value_loss(new_values, **arrays, clip=options.value_clip)
