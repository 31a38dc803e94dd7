"""Maximum likelihood as the loss of an update: what supervised fine-tuning minimises.

It has the functions of an algorithm that `training.policy_update` calls, see
`algorithms.algorithm`. There are no rewards, so it is not an algorithm that `algorithms.name` can
choose.

loss = -(sum over the tokens to learn of log p) / (number of these tokens in the batch)
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Bool, Float

from semrl_jax import algorithms
from semrl_jax.algorithms.algorithm import Needs


def needs(options: None) -> Needs:
    return Needs()


def token_weights(response_mask: Bool[Array, "B T"], options: None) -> Float[Array, "B T"]:
    return algorithms.token_weights(response_mask, aggregation="token_mean")


def loss(
    logprobs: Float[Array, "*tokens"],
    entropy: Float[Array, "*tokens"],
    *,
    weights: Float[Array, "*tokens"],
    options: None,
    **unused: object,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The share of a micro-batch in the loss of its batch, nats per token, and its scalars."""
    total = -algorithms.weighted_sum(logprobs, weights)
    scalars = {
        "policy/loss": total,
        "policy/entropy": algorithms.weighted_sum(jax.lax.stop_gradient(entropy), weights),
    }
    return total, jax.lax.stop_gradient(scalars)
