"""ACE: confident errors are punished more, by a factor on negative advantages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def error_penalty(
    advantages: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    response_mask: Bool[Array, "B T"],
    *,
    alpha: float | int,
) -> tuple[Float[Array, "B T"], Float[Array, ""]]:
    """Multiplies negative advantages by 1 + alpha softplus(c), c the confidence of the response.

    c = mean over the tokens of the response of old_logprobs - ref_logprobs

    Args:
      advantages: of an estimator, before shaping; 0.0 on masked-out tokens.
      old_logprobs, ref_logprobs: nats; may hold anything on masked-out tokens.
      response_mask: True on tokens that count.
      alpha: strength, at least 0; 0 changes nothing. At c = 0, where policy and reference agree,
        the factor is 1 + 0.69 alpha.

    Returns:
      Float32 advantages; and the mean factor over the tokens with a negative advantage, 1.0 if
      there is none. Neither has a gradient.

    Source: arXiv:2602.21420, which states the log-ratio to the reference, the softplus and that
    only wrong responses are affected. It leaves open, and this function chooses: the factor
    "1 + alpha ..."; the mean over tokens, since a sum would grow with the length; the policy at the
    start of the update. alpha is not published. A wrong response is one whose advantage is
    negative. If the advantages of its tokens differ, only the negative ones are multiplied.
    """
    log_ratio = old_logprobs.astype(jnp.float32) - ref_logprobs.astype(jnp.float32)
    length = jnp.maximum(jnp.sum(response_mask, axis=1, keepdims=True), 1)
    confidence = jnp.sum(jnp.where(response_mask, log_ratio, 0.0), axis=1, keepdims=True) / length
    negative = (advantages < 0) & response_mask
    factors = jnp.where(negative, 1 + alpha * jax.nn.softplus(confidence), 1.0)  # [B, T]
    count = jnp.sum(negative, dtype=jnp.float32)
    mean = jnp.sum(jnp.where(negative, factors, 0.0)) / jnp.maximum(count, 1)
    mean = jnp.where(count > 0, mean, 1.0)
    return jax.lax.stop_gradient((advantages.astype(jnp.float32) * factors, mean))
