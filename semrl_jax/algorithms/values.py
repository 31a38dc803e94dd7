"""Errors of a critic: its loss, and how much of the returns it explains."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class ValueLoss:
    """Settings of `value_loss`."""

    value_clip: float = setting(0.5, "largest change of a value in a step", above=0)


def value_loss(
    values: Float[Array, "B T"],
    old_values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    clip: float | int = 0.5,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Computes the clipped squared error of the critic.

    0.5 * sum_t weight_t max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)

    Args:
      values, old_values: of the critic now, with gradient, and at the start of the update.
      returns: targets, unshaped.
      weights: as in `policy_loss`; tokens of weight 0 may hold anything in the other arrays.
      clip: largest change of a value that can reduce the error, above 0; same unit as the values.

    Returns float32 loss and the scalars `critic/loss`, `critic/clip_fraction` (share of tokens
    where the clipped error is larger) and `critic/predicted_value`, their mean.
    """
    mask = weights > 0
    values, old_values, returns = (
        jnp.where(mask, x.astype(jnp.float32), 0.0) for x in (values, old_values, returns)
    )
    clipped = jnp.clip(values, old_values - clip, old_values + clip)
    error, clipped_error = (values - returns) ** 2, (clipped - returns) ** 2
    loss = 0.5 * jnp.sum(weights * jnp.maximum(error, clipped_error))
    report = {
        "critic/loss": loss,
        "critic/clip_fraction": jnp.sum(weights * (clipped_error > error)),
        "critic/predicted_value": jnp.sum(weights * values),
    }
    return loss, jax.lax.stop_gradient(report)


def explained_variance(
    values: Float[Array, "B T"], returns: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """1 - var(returns - values) / var(returns) over valid tokens; 0.0 if the returns are equal.

    Returns are equal if their standard deviation is below 1e-4 of the largest return or value: they
    are sums over the tokens of a response, whose rounding would be taken for variance.
    """
    values, returns = (jnp.where(mask, x.astype(jnp.float32), 0.0) for x in (values, returns))
    count = jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)

    def variance(x: Float[Array, "B T"]) -> Float[Array, ""]:
        return jnp.sum(jnp.where(mask, x - jnp.sum(x) / count, 0.0) ** 2) / count

    total = variance(returns)
    residual = variance(returns - values)
    largest = jnp.maximum(jnp.max(jnp.abs(returns)), jnp.max(jnp.abs(values)))
    differ = total > (1e-4 * largest) ** 2
    return jnp.where(differ, 1.0 - residual / jnp.where(differ, total, 1.0), 0.0)
