"""DCPO's smooth standardisation: rewards are compared with all earlier ones of their prompt too.

A = ((i - 1) a + b) / i or (a + (i - 1) b) / i, whichever has the smaller absolute value, at visit
i = 1, 2, ... of the prompt

a = (r - mean) / (std + 1e-6) over the group, b the same over all i groups of the prompt so far. A
group of equal rewards thus has the advantage b / i, as long as earlier groups had others.

Source: arXiv:2509.02333, Eqs. 5 to 7, and its code; with `surrogate="dcpo"`.

The statistics of i groups are those of its code. Its "only token mean", a sum over the responses of
their means, is `aggregation="response_mean"` with a learning rate that is larger by their number.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.algorithm import Needs, Passes
from semrl_jax.algorithms.groups import broadcast_to_tokens, centred, first_reward, group_mean
from semrl_jax.algorithms.objective import WholeResponses, group_needs, loss, token_weights

__all__ = [
    "Options", "advantages", "first_state", "loss", "needs", "next_state", "token_weights",
]  # fmt: skip

EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Options(WholeResponses):
    """Has no options of its own; see `Objective`."""


def needs(options: Options) -> Needs:
    return group_needs(options)._replace(prompt_state=True)


def first_state(options: Options) -> dict[str, float]:
    """The groups of a prompt so far, and mean and variance of their rewards."""
    return {"visits": 0.0, "mean": 0.0, "variance": 0.0}


def next_state(
    state: dict[str, Float[Array, " P"]],
    rewards: Float[Array, "P G"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
) -> dict[str, Float[Array, " P"]]:
    visits = state["visits"] + 1.0
    differences = centred(rewards)
    variance = jnp.sum(differences**2, axis=1) / (rewards.shape[1] - 1)
    # The mean of equal rewards is exact, so that a prompt with only these has a variance of 0.
    first = first_reward(rewards)
    mean = (first + group_mean(rewards - first))[:, 0]
    step = mean - state["mean"]
    earlier = visits - 1.0
    return {
        "visits": visits,
        "mean": jnp.where(earlier > 0, state["mean"] + step / visits, mean),
        "variance": (earlier * state["variance"] + variance + earlier / visits * step**2) / visits,
    }


def advantages(
    rewards: Float[Array, "P G"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
    state: dict[str, Any],
) -> Float[Array, "B T"]:
    rewards = rewards.astype(jnp.float32)
    after = next_state(state, rewards, passes, response_mask, options)
    visits, mean, variance = (after[name][:, None] for name in ("visits", "mean", "variance"))
    differences = centred(rewards)
    own = differences / (
        jnp.sqrt(jnp.sum(differences**2, axis=1, keepdims=True) / (rewards.shape[1] - 1)) + EPSILON
    )
    of_all = (rewards - mean) / (jnp.sqrt(variance) + EPSILON)
    mostly_own = ((visits - 1) * own + of_all) / visits
    mostly_all = (own + (visits - 1) * of_all) / visits
    found = jnp.where(jnp.abs(mostly_own) < jnp.abs(mostly_all), mostly_own, mostly_all)
    return jax.lax.stop_gradient(broadcast_to_tokens(found, response_mask))
