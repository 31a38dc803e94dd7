"""ARM: advantages fall for responses that the policy is sure of, and rise for the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float


def low_confidence(
    logprobs: Float[Array, "N T"], mask: Bool[Array, "N T"], *, fraction: float
) -> Float[Array, " N"]:
    """exp of the mean log-probability over the least probable tokens of each sequence.

    Args:
      logprobs: nats; may hold anything on masked-out tokens.
      mask: True on tokens that count.
      fraction: share of these tokens, in (0, 1], rounded up to whole tokens.

    Returns:
      Float32 in [0, 1]: the geometric mean of the probabilities; 1.0 for a sequence without tokens.
    """
    size = logprobs.shape[1]
    # In float64, and rounded: 0.28 * 25 is above 7 by a rounding error.
    counts = np.ceil(np.round(fraction * np.arange(size + 1), 6)).astype(np.int32)
    taken = jnp.asarray(counts)[jnp.sum(mask, axis=1)][:, None]  # [N, 1]
    ascending = jnp.sort(jnp.where(mask, logprobs.astype(jnp.float32), jnp.inf), axis=1)
    low = jnp.where(jnp.arange(size)[None] < taken, ascending, 0.0)
    return jnp.exp(jnp.sum(low, axis=1) / jnp.maximum(taken[:, 0], 1))


def confidence_reweighting(
    advantages: Float[Array, "B T"],
    rewards: Float[Array, "P G"],
    old_logprobs: Float[Array, "B T"],
    prompt_confidence: Float[Array, " P"],
    response_mask: Bool[Array, "B T"],
    *,
    alpha: float | int,
    low_fraction: float,
) -> tuple[Float[Array, "B T"], Float[Array, ""]]:
    """Adds alpha (c_prompt - c_response) to the advantages of groups with a positive reward.

    c_response is `low_confidence` of the response. A group of equal positive rewards, whose
    advantages are 0, gets a signal by this term: towards responses that the policy is less sure of.

    Args:
      advantages: of an estimator, before shaping; B = P * G responses in the order of `rewards`.
      rewards: of the verifier. A group without a reward above 0 is not changed.
      old_logprobs: nats, of the policy at the start of the update; may hold anything on masked-out
        tokens.
      prompt_confidence: in [0, 1], `low_confidence` of the prompts under the same policy.
      response_mask: True on tokens that count.
      alpha: strength, at least 0; 0 changes nothing.
      low_fraction: share of the tokens of a response that c_response is taken over, in (0, 1].

    Returns:
      Float32 advantages, 0.0 on masked-out tokens; and the mean of what was added, over the
      response tokens. Neither has a gradient.

    Source: ARM of ProGRPO, arXiv:2602.05281; low_fraction about 0.2 there. alpha is not published.
    The paper leaves open which policy gives the probabilities; here it is the one at the start of
    the update. Its condition is a sum of rewards other than 0, for rewards 0 and 1.
    """
    confidence = low_confidence(old_logprobs, response_mask, fraction=low_fraction)
    difference = prompt_confidence[:, None] - confidence.reshape(rewards.shape)
    solved = jnp.any(rewards > 0, axis=1, keepdims=True)
    added = jnp.where(solved, alpha * difference, 0.0).reshape(-1, 1)  # [B, 1]
    added = jnp.where(response_mask, added, 0.0)
    mean = jnp.sum(added) / jnp.maximum(jnp.sum(response_mask), 1)
    return jax.lax.stop_gradient((advantages.astype(jnp.float32) + added, mean))
