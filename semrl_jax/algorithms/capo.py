"""CAPO: each token by the outcome of its response and the reward of its step.

A_t = (R_t - mean) / sqrt(variance + 1e-8), R_t = outcome_weight r + process_weight s_t, mean and
variance over all tokens of the group

s_t is the [reward of the step](verifiers.md#rewards-of-steps) that token t is in, 0 outside of
steps: -1 for a wrong step and 0 for a right one in the paper, where r is 1 or 0. With an
environment, a turn is a step. A group of equal outcomes whose steps differ has advantages;
dynamic sampling would drop it, because it compares r alone.

Source: arXiv:2508.02298 (CAPO), with W_whole 2 and W_process 1. A language model judges the steps
there, by a vote; here a reward function does. The sample variance is that of `gae.whiten`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.algorithm import Needs, Passes
from semrl_jax.algorithms.gae import whiten
from semrl_jax.algorithms.objective import WholeResponses, group_needs, loss, token_weights
from semrl_jax.algorithms.turn_credit import turn_begins, turn_numbers
from semrl_jax.support.fields import setting

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]


@dataclasses.dataclass(frozen=True)
class Options(WholeResponses):
    """Own options; see `Objective` for the others."""

    outcome_weight: float = setting(2.0, "of the reward of the response", at_least=0)
    process_weight: float = setting(1.0, "of the reward of a token's step", at_least=0)


def needs(options: Options) -> Needs:
    return group_needs(options)._replace(spans=True)


def advantages(
    rewards: Float[Array, "P G"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
) -> Float[Array, "B T"]:
    outcome = rewards.astype(jnp.float32).reshape(-1, 1)
    # Steps of context, such as of the prefix of a branch, are not the policy's.
    own = jnp.where(response_mask, passes.spans.rewards, 0.0)
    of_steps = _of_steps(own, turn_begins(response_mask, passes.spans))
    total = options.outcome_weight * outcome + options.process_weight * of_steps
    groups = (rewards.shape[0], -1, response_mask.shape[1])
    found = jax.vmap(whiten)(total.reshape(groups), response_mask.reshape(groups))
    return found.reshape(response_mask.shape)


def _of_steps(rewards: Float[Array, "B T"], begins: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """The sum of the rewards of the turn of each token."""
    number, rows = turn_numbers(begins), jnp.arange(len(rewards))[:, None]
    sums = jnp.zeros(rewards.shape).at[rows, number].add(rewards)
    return jnp.take_along_axis(sums, number, axis=1)
