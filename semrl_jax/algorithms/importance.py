"""Corrections for the difference between rollout engine and policy.

Both compute the same distribution with different kernels and precisions. The engine therefore
samples from a slightly different one, which biases the gradient. Weights are not negative and have
no gradient: to multiply the advantages by them is to multiply the surrogate. KL and entropy do not
change.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.surrogates import MAX_LOG_RATIO
from semrl_jax.support.choices import IMPORTANCE_LEVELS, IMPORTANCE_OUTSIDE


def importance_weights(
    old_logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    response_mask: Bool[Array, "B T"],
    *,
    level: str,
    outside: str = "truncate",
    floor: float | int = 0.0,
    cap: float | int = 2.0,
) -> tuple[Float[Array, "B T"], Float[Array, ""]]:
    """Computes a weight for every token from the ratio of the policy's to the engine's probability.

    With d_t = old_logprobs_t - rollout_logprobs_t, the statistic of a token is
    "token": exp(d_t); "sequence": exp(sum of d over the response); "geometric": exp(mean of d over
    the response); "total_variation": |exp(old_logprobs_t) - exp(rollout_logprobs_t)|.

    outside="truncate": the weight is the statistic, kept within [floor, cap]. "mask": it is the
    statistic where that lies in [floor, cap], and 0 elsewhere. The statistic of "geometric" and
    "total_variation" is no importance weight: the weight is 1 inside the bounds.

    Args:
      old_logprobs, rollout_logprobs: nats; the engine must have sampled from the whole vocabulary.
      response_mask: True on tokens that count; elsewhere both arrays may hold anything.
      level: "token" has a small variance and a bias, because it takes the earlier tokens as
        sampled; "sequence" has no bias, but weights that vary widely.

    Returns:
      Float32 weights, 1.0 on masked-out tokens and where engine and policy agree; and the share of
      counted tokens outside the bounds. Neither has a gradient. A weight is NaN if a
      log-probability that counts is not finite: the update is then skipped and counted.

    Raises ValueError for settings that `check_importance` refuses.

    Source: truncation by token: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training" (fengyao.notion.site/off-policy-rl), cap 2; masks by token: "IcePop",
    arXiv:2510.18855, Sec. 2.3.2, such as 0.5 and 2; by sequence and geometric: verl (`rollout_is`,
    `rollout_rs`), such as 0.99 and 1.01; total variation: |p - q| of the sampled token as in
    arXiv:2602.04879, here between engine and policy. As in verl, the log of the ratio is kept
    within +-20. Masked tokens stay in the token mean and add 0.
    """
    check_importance(level=level, outside=outside, floor=floor, cap=cap)
    old, rollout = (
        jnp.where(response_mask, x.astype(jnp.float32), 0.0)
        for x in (old_logprobs, rollout_logprobs)
    )
    difference = jnp.where(jnp.isfinite(old) & jnp.isfinite(rollout), old - rollout, jnp.nan)
    if level in ("sequence", "geometric"):
        sums = jnp.sum(difference, axis=1, keepdims=True)  # [B, 1]
        if level == "geometric":
            sums = sums / jnp.maximum(jnp.sum(response_mask, axis=1, keepdims=True), 1)
        difference = jnp.where(response_mask, sums, 0.0)
    ratio = jnp.exp(jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    statistic = ratio
    if level == "total_variation":
        statistic = jnp.abs(jnp.exp(old) - jnp.exp(rollout))
        statistic = jnp.where(jnp.isnan(difference), jnp.nan, statistic)
    beyond = ((statistic < floor) | (statistic > cap)) & response_mask
    if outside == "truncate":
        weights = jnp.clip(ratio, floor, cap)
    else:
        weights = ratio if level in ("token", "sequence") else jnp.ones_like(ratio)
        weights = jnp.where(beyond, 0.0, weights)
        weights = jnp.where(jnp.isnan(statistic), jnp.nan, weights)
    num_tokens = jnp.maximum(jnp.sum(response_mask, dtype=jnp.float32), 1.0)
    share = jnp.sum(beyond, dtype=jnp.float32) / num_tokens
    return jax.lax.stop_gradient((weights, share))


def check_importance(*, level: str, outside: str, floor: float | int, cap: float | int) -> None:
    """Raises ValueError, which begins with the field, for settings that mean nothing."""
    if level not in IMPORTANCE_LEVELS:
        raise ValueError(f"level={level!r} must be one of {', '.join(IMPORTANCE_LEVELS)}.")
    if outside not in IMPORTANCE_OUTSIDE:
        raise ValueError(f"outside={outside!r} must be one of {', '.join(IMPORTANCE_OUTSIDE)}.")
    if level in ("geometric", "total_variation") and outside != "mask":
        raise ValueError(f"outside={outside!r} must be 'mask' with level={level!r}.")
    if level == "total_variation":
        if floor != 0:
            raise ValueError(f"floor={floor} must be 0 with level='total_variation'.")
        if not 0 < cap <= 1:
            raise ValueError(f"cap={cap} must be in (0, 1] with level='total_variation'.")
        return
    if not 0 <= floor <= 1:
        raise ValueError(f"floor={floor} must be in [0, 1].")
    if not cap >= 1:
        raise ValueError(f"cap={cap} must be at least 1: it would lower the weights of all tokens.")
