"""Elliptical novelty: how little the other responses of a group explain a response."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.metrics.spectrum import symmetric_product, with_float64
from semrl_jax.metrics.valid_rows import AnyArray, check_states


def elliptical_novelty(
    features: Float[AnyArray, "G D"], mask: Bool[AnyArray, " G"]
) -> Float[Array, " G"]:
    """Computes b_g = x_g^T (I + sum_(h != g) x_h x_h^T)^-1 x_g of every response.

    With K = X X^T this is 1 / M_gg - 1, M = (K + I)^-1, which needs no D x D matrix. Computed in
    float64.

    Args:
      features: one row per response, such as its mean state divided by its length; any real float
        dtype. Rows outside the mask may hold anything. Directions in which the others have a sum of
        squares below 1 count as new: for another bound r, divide the features by sqrt(r).
      mask: True on responses that count.

    Returns float32 in [0, |x_g|^2], the upper end if all others are orthogonal to it; 0.0 outside
    the mask, and throughout if a row under the mask is not finite.

    Source: arXiv:2510.11686, reward type `leave_one_out` of its implementation, with ridge 1.
    """
    return with_float64(_novelty)(*checked(features, mask))


def checked(features: AnyArray, mask: AnyArray) -> tuple[Array, Array]:
    """Float32 rows and mask."""
    check_states(features, mask, axes="[G, D], a row per response", fields=("features", "mask"))
    return jnp.asarray(features, jnp.float32), jnp.asarray(mask)


def kernel(rows: Float[Array, "G D"], mask: Bool[Array, " G"]) -> Float[Array, "G G"]:
    """I + K of the rows under the mask, in float64; I if one of them is not finite."""
    rows = jnp.where(mask[:, None], rows.astype(jnp.float64), 0.0)
    rows = jnp.where(jnp.all(jnp.isfinite(rows)), rows, 0.0)
    return symmetric_product(rows) + jnp.eye(rows.shape[0])


def _novelty(rows: Float[Array, "G D"], mask: Bool[Array, " G"]) -> Float[Array, " G"]:
    factor = jax.scipy.linalg.cho_factor(kernel(rows, mask), lower=True)
    inverse = jax.scipy.linalg.cho_solve(factor, jnp.eye(rows.shape[0]))
    novelty = jnp.maximum(1.0 / jnp.diagonal(inverse) - 1.0, 0.0)
    return jnp.where(mask, novelty, 0.0).astype(jnp.float32)
