"""Given responses, which another policy wrote: what a token of one adds to the loss, by name.

All take p = exp(logprobs), the policy's probability of a token, and its advantage A. There is no
ratio to the policy that wrote the token; "sg" stops the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.surrogates import Tokens

GAMMA = 0.1  # of `luffy`


class GivenSurrogate(NamedTuple):
    """A surrogate of given responses, and what it needs."""

    loss: Callable[[Tokens], Float[Array, "*tokens"]]
    old_logprobs: bool = False
    is_apart: bool = False  # its responses do not count in the statistics of their groups


def luffy(tokens: Tokens) -> Float[Array, "*tokens"]:
    """-A p / (p + 0.1): "policy shaping", which raises improbable tokens more than -A p does.

    Entropy and KL include given tokens.

    Source: arXiv:2504.14945 (LUFFY) and its code, with 1 given response of 8, `dr_grpo` and
    `aggregation="constant_length"`; ratios of sampled tokens have no bounds there.

    The probability under the other policy counts as 1.
    """
    p = jnp.exp(tokens.logprobs)
    return -tokens.advantages * p / (p + GAMMA)


def rl_plus(tokens: Tokens) -> Float[Array, "*tokens"]:
    """-A sqrt(1 - sg(p)) 2 p / (q + (q + 1) / 2), q = exp(old_logprobs): two policies as one.

    The unknown policy is estimated by the mean of q and 1. The root raises improbable tokens more.

    Source: arXiv:2508.00222 (RL-PLUS) and its code, with the other settings of `luffy`.

    The exponent 1/2 is from the code.
    """
    p, q = jnp.exp(tokens.logprobs), jnp.exp(jax.lax.stop_gradient(tokens.old_logprobs))
    explore = jnp.sqrt(1 - jnp.minimum(jax.lax.stop_gradient(p), 1.0))
    return -tokens.advantages * explore * 2 * p / (1.5 * q + 0.5)


def sft(tokens: Tokens) -> Float[Array, "*tokens"]:
    """-logprobs: supervised learning, next to the reinforcement learning of the sampled responses.

    Given responses do not count in the mean reward of their group: their own reward is replaced by
    the mean of the sampled ones. A deviation or a factor of the group's size still counts them.
    With `rollout.given_when="failed"`, a failed group learns its demonstration alone.

    Source: arXiv:2506.07527 (ReLIFT).

    Its code collects demonstrations of failed prompts, and makes updates on them alone, with an
    optimiser of their own; here they are in the batch.
    """
    return -tokens.logprobs


GIVEN_SURROGATES = {
    "luffy": GivenSurrogate(luffy),
    "rl_plus": GivenSurrogate(rl_plus, old_logprobs=True),
    "sft": GivenSurrogate(sft, is_apart=True),
}


def without_given(rewards: Float[Array, "P G"], sampled: Bool[Array, "P G"]) -> Float[Array, "P G"]:
    """The rewards of sampled responses, and of the others the mean of those in their group."""
    mean = jnp.mean(rewards, axis=1, keepdims=True, where=sampled)
    return jnp.where(sampled, rewards, mean)
