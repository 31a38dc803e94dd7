"""The implicit reward of a response, for algorithms whose loss is a function of it.

s = sum over its tokens of old_logprobs - ref_logprobs

Such an algorithm has a loss L(b s) of the rewards of a group. Its gradient at the start of a
step is that of a policy gradient with the advantage -dL/ds on every token of the response. So the
advantages below give the loss exactly in the first update on a batch, with `surrogate="reinforce"`,
and through the ratio of the surrogate later. `aggregation="constant_length"` sums over tokens, as
the papers do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.algorithm import Needs, Passes
from semrl_jax.algorithms.groups import broadcast_to_tokens, check_groups
from semrl_jax.algorithms.objective import Objective
from semrl_jax.algorithms.turn_credit import total_rewards
from semrl_jax.support.fields import setting

Estimate = Callable[..., Float[Array, "P G"]]


@dataclasses.dataclass(frozen=True)
class ImplicitReward(Objective):
    """The reference is `model.reference_path`, or the weights at the start."""

    reward_beta: float = setting(0.1, "weight of the log-ratio to the reference", above=0)


def needs(options: ImplicitReward) -> Needs:
    names = ("groups", "reference", "early_reference", "old_logprobs", "early_old_logprobs")
    return options.needs()._replace(**dict.fromkeys(names, True))


def each_response(estimate: Estimate) -> Callable[..., Float[Array, "B T"]]:
    """Makes the `advantages` of an algorithm of an estimate from (rewards, s, options).

    Rewards and s, float32 nats, are [P, G]; the rewards of turns count together. Tokens that do not
    count may hold anything.
    """

    def advantages(
        rewards: Float[Array, "P G *tokens"],
        passes: Passes,
        response_mask: Bool[Array, "B T"],
        options: ImplicitReward,
    ) -> Float[Array, "B T"]:
        rewards = rewards if rewards.ndim == 2 else total_rewards(rewards)
        check_groups(rewards)
        ratios = jnp.where(response_mask, passes.old_logprobs - passes.ref_logprobs, 0.0)
        implicit = jnp.sum(ratios, axis=1).reshape(rewards.shape)
        found = estimate(rewards, implicit, options)
        return jax.lax.stop_gradient(broadcast_to_tokens(found, response_mask))

    return advantages
