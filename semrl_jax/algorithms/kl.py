"""Estimators of the KL divergence from the reference, and its use as a penalty on rewards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.support.choices import KL_ESTIMATORS

LOW_VAR_LIMIT = 10.0
MAX_EXPONENT = 20.0  # far above the limit, far below the overflow of float32


def kl_estimate(
    logprobs: Float[Array, "*axes"],
    ref_logprobs: Float[Array, "*axes"],
    *,
    estimator: str = "low_var_kl",
) -> Float[Array, "*axes"]:
    """Estimates KL(policy || reference) at each token from the sampled token; float32 nats.

    With x = logprobs - ref_logprobs: "kl" x, "abs" |x|, "mse" x^2 / 2, "low_var_kl"
    clip(exp(-x) + x - 1, -10, 10), "low_var_kl+" the value of "low_var_kl" with the gradient of
    "mse", whose mean over sampled tokens is the gradient of the KL.

    Args:
      logprobs, ref_logprobs: nats, computed in float32; the gradient flows through the estimate.
      estimator: one of KL_ESTIMATORS; ValueError for another one.

    Source: Schulman, "Approximating KL divergence", 2020; the limit of 10 is the reference
    implementation's.
    """
    x = logprobs.astype(jnp.float32) - ref_logprobs.astype(jnp.float32)
    if estimator == "kl":
        return x
    if estimator == "abs":
        return jnp.abs(x)
    if estimator == "mse":
        return 0.5 * x * x
    if estimator == "low_var_kl":
        # An overflowing exponential would turn the clipped gradient from 0 into 0 * inf.
        value = jnp.expm1(jnp.minimum(-x, MAX_EXPONENT)) + x
        return jnp.clip(value, -LOW_VAR_LIMIT, LOW_VAR_LIMIT)
    if estimator == "low_var_kl+":
        value = kl_estimate(logprobs, ref_logprobs, estimator="low_var_kl")
        square = 0.5 * x * x
        return jax.lax.stop_gradient(value) + square - jax.lax.stop_gradient(square)
    raise ValueError(
        f"kl_estimator={estimator!r} is unknown; it must be one of {', '.join(KL_ESTIMATORS)}."
    )


def penalised_rewards(
    rewards: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    response_mask: Bool[Array, "B T"],
    *,
    coefficient: float | int | Float[Array, ""],
    estimator: str = "kl",
) -> tuple[Float[Array, "B T"], Float[Array, ""]]:
    """Subtracts coefficient * KL from each token's reward.

    Args:
      rewards: float32 per token, usually the score on the last one.
      old_logprobs, ref_logprobs: nats; masked-out tokens of all three may hold anything.
      coefficient: nats to reward, fixed or from `update_kl_coefficient`.
      estimator: one of KL_ESTIMATORS.

    Returns float32 rewards, 0.0 on masked-out tokens, and the mean KL over valid tokens in nats,
    0.0 if there are none. Neither has a gradient.
    """
    old = jnp.where(response_mask, old_logprobs.astype(jnp.float32), 0.0)
    reference = jnp.where(response_mask, ref_logprobs.astype(jnp.float32), 0.0)
    kl = kl_estimate(old, reference, estimator=estimator)
    penalised = jnp.where(response_mask, rewards.astype(jnp.float32) - coefficient * kl, 0.0)
    num_tokens = jnp.maximum(jnp.sum(response_mask, dtype=jnp.float32), 1.0)
    mean = jnp.sum(jnp.where(response_mask, kl, 0.0)) / num_tokens
    return jax.lax.stop_gradient((penalised, mean))


def update_kl_coefficient(
    coefficient: float | int | Float[Array, ""],
    kl: Float[Array, ""],
    *,
    target: float | int,
    horizon: float | int,
    num_responses: int,
) -> Float[Array, ""]:
    """Moves the coefficient so that the KL approaches its target.

    coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * num_responses / horizon)

    Args:
      coefficient: before this batch, not negative.
      kl, target: mean over the batch in nats, and its target, above 0.
      horizon: responses over which the coefficient may change by a fifth, at least num_responses.

    Source: Ziegler et al. 2019, arXiv:1909.08593, Sec. 2.2.
    """
    error = jnp.clip(jnp.asarray(kl, jnp.float32) / target - 1.0, -0.2, 0.2)
    return coefficient * (1.0 + error * num_responses / horizon)
