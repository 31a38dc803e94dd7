"""Generalised advantage estimation, and whitening over the tokens of a batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def generalized_advantages(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    response_mask: Bool[Array, "B T"],
    *,
    gamma: float | int = 1.0,
    gae_lambda: float | int = 1.0,
    ends: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Estimates advantages by an exponentially weighted sum of temporal differences.

    delta_t = r_t + gamma V_(t+1) - V_t,  A_t = delta_t + gamma lambda A_(t+1),  R_t = A_t + V_t

    Args:
      rewards, values: computed in float32; V_t is the critic's before response token t. Masked-out
        tokens may hold anything.
      response_mask: True on tokens that count; t + 1 is the next such token. After the last one, V
        and A are 0.
      gamma, gae_lambda: discount, and weight of later differences, in [0, 1].
      ends: where gamma and gae_lambda act, between this token and the next; elsewhere they are 1.
        None: at every token.

    Returns advantages (not whitened) and returns, float32, 0.0 on masked-out tokens, no gradient.

    Source: arXiv:1506.02438, Eq. 16. The reference implementation includes the critic's value at
    the first padding token, which biases lambda < 1.
    """
    rewards = jnp.where(response_mask, rewards.astype(jnp.float32), 0.0)
    values = jnp.where(response_mask, values.astype(jnp.float32), 0.0)

    def backwards(later, token):  # all arrays [B]
        next_value, next_advantage = later
        reward, value, valid, end = token
        discount, decay = gamma, gamma * gae_lambda
        if end is not None:
            discount, decay = jnp.where(end, discount, 1.0), jnp.where(end, decay, 1.0)
        delta = reward + discount * next_value - value
        advantage = delta + decay * next_advantage
        carried = jnp.where(valid, value, next_value), jnp.where(valid, advantage, next_advantage)
        return carried, jnp.where(valid, advantage, 0.0)

    end = jnp.zeros(rewards.shape[0]), jnp.zeros(rewards.shape[0])
    tokens = rewards.T, values.T, response_mask.T, None if ends is None else ends.T  # [T, B]
    _, advantages = jax.lax.scan(backwards, end, tokens, reverse=True)
    advantages = advantages.T  # [B, T]
    return jax.lax.stop_gradient((advantages, advantages + values))


def whiten(
    values: Float[Array, "B T"], mask: Bool[Array, "B T"], *, epsilon: float | int = 1e-8
) -> Float[Array, "B T"]:
    """Shifts and scales to mean 0 and sample variance 1 over all valid tokens of the batch.

    (v - mean) * rsqrt(var + epsilon), var with n - 1. Float32, 0.0 on masked-out tokens, which may
    hold anything; 0.0 everywhere if all valid values are equal or there is only one.
    """
    values = jnp.where(mask, values.astype(jnp.float32), 0.0)
    count = jnp.sum(mask, dtype=jnp.float32)
    # Minus a valid value first: the mean of equal values may round, which rsqrt would amplify.
    offset = jnp.max(values, initial=-jnp.inf, where=mask)
    centred = jnp.where(mask, values - jnp.where(count > 0, offset, 0.0), 0.0)
    mean = jnp.sum(centred) / jnp.maximum(count, 1.0)
    centred = jnp.where(mask, centred - mean, 0.0)
    variance = jnp.sum(centred**2) / jnp.maximum(count - 1.0, 1.0)
    return centred * jax.lax.rsqrt(variance + epsilon)
