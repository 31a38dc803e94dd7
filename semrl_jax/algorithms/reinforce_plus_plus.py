"""REINFORCE++: rewards of all prompts, less a KL per token, whitened over the batch.

x_t = r at the last token, 0 elsewhere, less kl_reward_coefficient (old_logprobs_t - ref_logprobs_t)

A_t = (R_t - mean) / sqrt(variance + 1e-8), R_t the sum of x from t on, mean and variance over all
tokens of the batch

With `group_baseline`, r is less the mean of its group first ("REINFORCE++-baseline"); without it,
one response per prompt is enough.

Source: arXiv:2501.03262.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.algorithm import Needs, Passes, check_options
from semrl_jax.algorithms.groups import broadcast_to_tokens, centred
from semrl_jax.algorithms.kl import penalised_rewards
from semrl_jax.algorithms.objective import Objective, loss, token_weights
from semrl_jax.algorithms.ppo import whiten

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]


@dataclasses.dataclass(frozen=True)
class Options(Objective):
    """A KL in the reward excludes one in the loss."""

    group_baseline: bool = False
    kl_reward_coefficient: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        both = self.kl_reward_coefficient and self.kl_coefficient
        check_options(
            self,
            kl_reward_coefficient=(
                self.kl_reward_coefficient >= 0 and not both,
                "be at least 0, and 0 if kl_coefficient is not: the KL would count twice",
            ),
        )


def needs(options: Options) -> Needs:
    own = options.needs()
    if options.kl_reward_coefficient:
        own = own._replace(reference=True, old_logprobs=True)
    return own._replace(groups=options.group_baseline)


def advantages(
    rewards: Float[Array, "P G"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
) -> Float[Array, "B T"]:
    if options.group_baseline:
        rewards = centred(rewards)
    returns = broadcast_to_tokens(rewards, response_mask)
    if options.kl_reward_coefficient:
        penalties, _ = penalised_rewards(
            jnp.zeros_like(returns),
            passes.old_logprobs,
            passes.ref_logprobs,
            response_mask,
            coefficient=options.kl_reward_coefficient,
        )
        returns = returns + jnp.cumsum(penalties[:, ::-1], axis=1)[:, ::-1]
    return jax.lax.stop_gradient(whiten(returns, response_mask))
