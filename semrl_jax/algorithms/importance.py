"""Truncated importance sampling: corrects for the difference between rollout engine and policy.

Both compute the same distribution with different kernels and precisions. The engine therefore
samples from a slightly different one, which biases the gradient. Weights are not negative and have
no gradient: to multiply the advantages by them is to multiply the clipped surrogate. KL and entropy
do not change.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.losses import MAX_LOG_RATIO
from semrl_jax.choices import IMPORTANCE_LEVELS


def importance_weights(
    old_logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    response_mask: Bool[Array, "B T"],
    *,
    level: str,
    cap: float | int = 2.0,
) -> tuple[Float[Array, "B T"], Float[Array, ""]]:
    """Computes the ratio of the policy's to the engine's probability, up to a cap.

    "token": w_t = min(exp(old_logprobs_t - rollout_logprobs_t), cap). "sequence": the same with the
    sums over the response, for all its tokens.

    Args:
      old_logprobs: nats.
      rollout_logprobs: nats, as the engine reported. It must have sampled from the whole
        vocabulary, without top-p or top-k.
      response_mask: True on tokens that count; elsewhere both arrays may hold anything.
      level: one of IMPORTANCE_LEVELS. "token" has a small variance and leaves a bias, because it
        takes the earlier tokens as the engine sampled them. "sequence" has no such bias, but the
        weights of long responses vary widely.
      cap: at least 1; it bounds the variance.

    Returns:
      Float32 weights in (0, cap], 1.0 on masked-out tokens and where engine and policy agree; and
      the share of counted tokens whose weight was capped. Neither has a gradient. A weight is NaN
      if a log-probability that counts is not finite: the loss is then NaN, and the update is
      skipped and counted.

    Raises:
      ValueError: for another level, or a cap below 1, which would lower every weight.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (fengyao.notion.site/off-policy-rl), by token; by sequence as in verl (`rollout_is`,
    `rollout_is_threshold=2.0`, its default) and TRL (`vllm_importance_sampling_correction`). As in
    verl, the log of the ratio is kept within +-20, so a weight is never below 2e-9. Unlike verl,
    this neither rejects whole responses nor normalises over the batch.
    """
    if level not in IMPORTANCE_LEVELS:
        raise ValueError(f"level={level!r} is unknown; it must be one of {IMPORTANCE_LEVELS}.")
    if not cap >= 1:
        raise ValueError(f"cap={cap} must be at least 1.")
    old, rollout = (
        jnp.where(response_mask, x.astype(jnp.float32), 0.0)
        for x in (old_logprobs, rollout_logprobs)
    )
    log_ratio = jnp.where(jnp.isfinite(old) & jnp.isfinite(rollout), old - rollout, jnp.nan)
    if level == "sequence":
        sums = jnp.sum(log_ratio, axis=1, keepdims=True)  # [B, 1]
        log_ratio = jnp.where(response_mask, sums, 0.0)
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    num_tokens = jnp.maximum(jnp.sum(response_mask, dtype=jnp.float32), 1.0)
    share = jnp.sum(ratio > cap, dtype=jnp.float32) / num_tokens
    return jax.lax.stop_gradient((jnp.minimum(ratio, cap), share))
