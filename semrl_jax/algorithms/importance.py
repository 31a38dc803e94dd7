"""Truncated importance sampling: what the rollout engine sampled, weighted as if the policy had.

Engine and policy compute the same distribution with other kernels and precisions, so responses
come from a slightly different one, and the gradient from them is biased. Weights are never
negative and carry no gradient: multiplying the advantages by them is multiplying the clipped
surrogate, and leaves KL and entropy alone.
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
    """Computes how much likelier the policy makes what the engine sampled, up to a cap.

    "token": w_t = min(exp(old_logprobs_t - rollout_logprobs_t), cap). "sequence": the same of the
    sums over a response, for all of its tokens.

    Args:
      old_logprobs: nats, of the policy at the start of the update.
      rollout_logprobs: nats, as the engine reported, of the distribution it sampled from, which has
        to have every token the policy has: not one cut by top-p or top-k.
      response_mask: True on tokens that count; elsewhere both arrays may hold anything.
      level: one of IMPORTANCE_LEVELS. By token the variance is small and a bias is left, since the
        tokens before are taken as the engine drew them; by sequence it is the other way round, and
        the weights of long responses spread far.
      cap: at least 1; it bounds the variance.

    Returns:
      Float32 weights in (0, cap], 1.0 on masked-out tokens and wherever engine and policy agree;
      and the share of counted tokens whose weight the cap cut. NaN where a log-probability that
      counts is not finite, which makes the loss NaN and the update one that is skipped and counted.
      Neither has a gradient.

    Raises:
      ValueError: for another level, or a cap below 1, which would lower every weight.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (fengyao.notion.site/off-policy-rl), truncated importance sampling, by token; by
    sequence as verl's rollout correction (`rollout_is`, `rollout_is_threshold=2.0`, its default)
    and TRL (`vllm_importance_sampling_correction`) have it. As in verl the log of the ratio is kept
    within +-20, so a weight is never below 2e-9. The rejection of whole responses and the
    normalisation over the batch that verl adds are left out.
    """
    if level not in IMPORTANCE_LEVELS:
        raise ValueError(f"level={level!r} is unknown; it must be one of {IMPORTANCE_LEVELS}.")
    if not cap >= 1:
        raise ValueError(f"cap={cap} must be at least 1.")
    # Masked before any arithmetic: sums would take the padding in.
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
