"""The policy loss, as weighted sums over tokens.

Every mean here is sum(weights * x) with weights that sum to 1 over a mini-batch. Losses and
gradients of micro-batches therefore add up to those of their mini-batch, whatever the split.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.algorithms.kl import kl_estimate

AGGREGATIONS = ("token_mean", "response_mean")
MAX_LOG_RATIO = 20.0


def token_weights(
    response_mask: Bool[Array, "B T"], *, aggregation: str = "token_mean"
) -> Float[Array, "B T"]:
    """Computes how much each token of a mini-batch counts.

    Args:
      response_mask: True on tokens that count, of the whole mini-batch; split the weights, not the
        mask, into micro-batches.
      aggregation: "token_mean": all tokens have the same weight; "response_mean": all responses
        with a token have the same weight, divided equally among its tokens.

    Returns:
      Float32, 0.0 on masked-out tokens, sum 1.0 (0.0 if no token counts).

    Raises:
      ValueError: for another aggregation.

    Source: the reference implementation averages over the tokens of each micro-batch, then over
    micro-batches; with micro-batches of one response that is "response_mean".
    """
    mask = response_mask.astype(jnp.float32)
    if aggregation == "token_mean":
        return mask / jnp.maximum(jnp.sum(mask), 1.0)
    if aggregation == "response_mean":
        lengths = jnp.sum(mask, axis=1, keepdims=True)  # [B, 1]
        num_responses = jnp.sum(lengths > 0, dtype=jnp.float32)
        return mask / jnp.maximum(lengths, 1.0) / jnp.maximum(num_responses, 1.0)
    raise ValueError(
        f"aggregation={aggregation!r} is unknown; it must be one of {', '.join(AGGREGATIONS)}."
    )


def weighted_sum(x: Float[Array, "B T"], weights: Float[Array, "B T"]) -> Float[Array, ""]:
    """Sum of weights * x; where the weight is 0, x may hold anything."""
    return jnp.sum(jnp.where(weights > 0, x, 0.0) * weights)


def sum_over_sequences(
    values: Float[Array, "R U"], sequence_ids: Int[Array, "R U"]
) -> Float[Array, "R U"]:
    """Gives every token the sum over its sequence, where rows hold one or more sequences.

    A quantity of a sequence, such as a ratio of probabilities, is thus an array over tokens. The
    weights of "response_mean" sum to 1 / number of sequences over each sequence, so the weighted
    sum of such an array is its mean over sequences.

    Args:
      values: per token, summed in float32, with gradient.
      sequence_ids: number of each token's sequence in its row, from 1 to at most U; 0 at padding,
        where `values` may hold anything. For padded rows, the response mask as int32.

    Returns:
      Float32; 0.0 at padding. No sum crosses rows, so rows on several devices need no exchange.
    """
    mask = sequence_ids > 0
    values = jnp.where(mask, values.astype(jnp.float32), 0.0)

    def of_row(values, ids):
        return jax.ops.segment_sum(values, ids, num_segments=values.shape[0] + 1)[ids]

    return jnp.where(mask, jax.vmap(of_row)(values, sequence_ids), 0.0)


def token_entropy(logits: Float[Array, "*axes V"]) -> Float[Array, "*axes"]:
    """Entropy of softmax(logits) in nats, float32; logits of -inf have probability 0."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    # p log p tends to 0; the where keeps 0 * inf out of value and gradient.
    possible = jnp.isfinite(logprobs)
    logprobs = jnp.where(possible, logprobs, 0.0)
    return -jnp.sum(jnp.where(possible, jnp.exp(logprobs) * logprobs, 0.0), axis=-1)


def clipped_policy_loss(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    clip_epsilon: float | int = 0.2,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Computes the clipped surrogate, negated for minimising.

    r = exp(logprobs - old_logprobs);  sum_t weight_t max(-A r, -A clip(r, 1 - eps, 1 + eps))

    Args:
      logprobs: nats, computed in float32, with gradient.
      old_logprobs: nats.
      advantages: of any sign, shaped or not; no gradient flows into them.
      weights: as in `policy_loss`.
      clip_epsilon: in (0, 1), the same on both sides.

    Returns:
      Float32 loss, and the share of tokens (by weight) where the clipped term is larger.

    Raises:
      ValueError: for clip_epsilon outside (0, 1).

    Source: arXiv:1707.06347, Eq. 7; no second clip for negative advantages. In addition, log r is
    kept within +-20, so that the ratio stays in the range of float32.
    """
    if not 0 < clip_epsilon < 1:
        raise ValueError(f"clip_epsilon={clip_epsilon} must lie in (0, 1).")
    mask = weights > 0
    # Masked before any arithmetic: a NaN there would reach the gradient through 0 * NaN.
    log_ratio = jnp.where(mask, logprobs.astype(jnp.float32), 0.0) - jax.lax.stop_gradient(
        jnp.where(mask, old_logprobs.astype(jnp.float32), 0.0)
    )
    advantages = jax.lax.stop_gradient(jnp.where(mask, advantages.astype(jnp.float32), 0.0))
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - clip_epsilon, 1.0 + clip_epsilon)
    loss = weighted_sum(jnp.maximum(plain, clipped), weights)
    share = weighted_sum((clipped > plain).astype(jnp.float32), weights)
    return loss, jax.lax.stop_gradient(share)


def policy_loss(
    logprobs: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    *,
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"] | None,
    advantages: Float[Array, "B T"],
    weights: Float[Array, "B T"],
    clip_epsilon: float | int = 0.2,
    kl_coefficient: float | int | Float[Array, ""] = 0.001,
    entropy_coefficient: float | int | Float[Array, ""] = 0.001,
    kl_estimator: str = "low_var_kl",
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Computes the loss of a micro-batch: its share of the mini-batch mean.

    loss = pg - entropy_coefficient * entropy + kl_coefficient * kl

    Args:
      logprobs: nats of the response tokens under the policy now, with gradient.
      entropy: nats of the whole distribution at each token, with gradient (`token_entropy`).
      old_logprobs, advantages: as in `clipped_policy_loss`.
      ref_logprobs: under the reference; may be None if kl_coefficient is 0: no KL is computed.
      weights: float32 from `token_weights` of the whole mini-batch. Tokens of weight 0 may hold
        anything in the other arrays.
      kl_coefficient, entropy_coefficient: not negative.
      clip_epsilon, kl_estimator: see `clipped_policy_loss` and `kl_estimate`.

    Returns:
      Float32 loss, and scalars to be summed over micro-batches like it: `policy/loss`,
      `policy/pg_loss`, `policy/clip_fraction`, `policy/approx_kl` (of old_logprobs - logprobs),
      `policy/entropy` and, with ref_logprobs, `policy/kl`; in nats, without gradient.

    Raises:
      ValueError: for an option out of range, or a KL without ref_logprobs.
    """
    mask = weights > 0
    without_kl = isinstance(kl_coefficient, float | int) and kl_coefficient == 0
    if ref_logprobs is None and not without_kl:
        raise ValueError(
            f"kl_coefficient={kl_coefficient} needs ref_logprobs, which is None; compute them "
            "with the reference, or set kl_coefficient to 0."
        )
    logprobs, entropy, old_logprobs = (
        jnp.where(mask, x.astype(jnp.float32), 0.0) for x in (logprobs, entropy, old_logprobs)
    )
    pg_loss, clip_fraction = clipped_policy_loss(
        logprobs, old_logprobs, advantages, weights, clip_epsilon=clip_epsilon
    )
    mean_entropy = weighted_sum(entropy, weights)
    loss = pg_loss - entropy_coefficient * mean_entropy
    report = {}
    if ref_logprobs is not None:
        reference = jax.lax.stop_gradient(jnp.where(mask, ref_logprobs.astype(jnp.float32), 0.0))
        kl = weighted_sum(kl_estimate(logprobs, reference, estimator=kl_estimator), weights)
        loss = loss + kl_coefficient * kl
        report["policy/kl"] = kl
    report |= {
        "policy/loss": loss,
        "policy/pg_loss": pg_loss,
        "policy/clip_fraction": clip_fraction,
        "policy/approx_kl": weighted_sum(old_logprobs - logprobs, weights),
        "policy/entropy": mean_entropy,
    }
    return loss, jax.lax.stop_gradient(report)
