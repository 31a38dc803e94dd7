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

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.algorithm import Needs, Passes
from semrl_jax.algorithms.groups import check_groups
from semrl_jax.algorithms.objective import Objective
from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class ImplicitReward(Objective):
    """The reference is `model.reference_path`, or the weights at the start."""

    reward_beta: float = setting(0.1, "weight of the log-ratio to the reference", above=0)


def needs(options: ImplicitReward) -> Needs:
    names = ("groups", "reference", "early_reference", "old_logprobs", "early_old_logprobs")
    return options.needs()._replace(**dict.fromkeys(names, True))


def of_responses(
    rewards: Float[Array, "P G *tokens"], passes: Passes, response_mask: Bool[Array, "B T"]
) -> tuple[Float[Array, "P G"], Float[Array, "P G"]]:
    """The reward and s, float32 nats, of each response; turns count together.

    Tokens that do not count may hold anything.
    """
    rewards = rewards if rewards.ndim == 2 else jnp.sum(rewards, axis=2)
    check_groups(rewards)
    found = jnp.where(response_mask, passes.old_logprobs - passes.ref_logprobs, 0.0)
    return rewards, jnp.sum(found, axis=1).reshape(rewards.shape)
