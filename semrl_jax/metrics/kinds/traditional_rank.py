"""Rank of a response: the number of singular values above sigma_max * max(T, D) * eps of float32.

T are the valid tokens. The noise of float32 Gram eigenvalues lies above this threshold, so the
values come from float64. 0.0 if T < 2, if all rows are equal, or below 1.2e-38.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from semrl_jax.metrics.metric import Metric


def traditional_rank_of(
    sigma: Float[Array, " S"], scale: Float[Array, ""], num_rows: Int[Array, ""], width: int
) -> Float[Array, ""]:
    """Singular values above the float32 noise of a matrix of this size."""
    relative = jnp.maximum(num_rows, width).astype(jnp.float32) * jnp.finfo(jnp.float32).eps
    threshold = jnp.max(sigma, initial=0.0) * relative
    return jnp.where(num_rows >= 2, jnp.sum(sigma > threshold, dtype=jnp.float32), 0.0)


METRIC = Metric(of_spectrum=traditional_rank_of, min_tokens=2, needs_all_values=True)
