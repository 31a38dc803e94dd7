"""Rank of one response: the number of singular values above rounding."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.metrics.inputs import AnyArray
from semrl_jax.metrics.metric import Metric
from semrl_jax.metrics.prefixes import whole_response


def traditional_rank(
    hidden_states: Float[AnyArray, "T D"], response_mask: Bool[AnyArray, " T"]
) -> Float[Array, ""]:
    """Counts singular values above sigma_max * max(T, D) * eps of float32, T valid tokens.

    Computed in float64, because the noise of float32 Gram eigenvalues lies above this threshold.
    Arguments, errors and zeros as in `effective_rank`; 0.0 also if all rows are equal, or below
    1.2e-38.
    """
    return whole_response(METRIC, hidden_states, response_mask, "svd")


def traditional_rank_of(
    sigma: Float[Array, " S"], scale: Float[Array, ""], num_rows: Int[Array, ""], width: int
) -> Float[Array, ""]:
    """Singular values above the float32 noise of a matrix of this size."""
    relative = jnp.maximum(num_rows, width).astype(jnp.float32) * jnp.finfo(jnp.float32).eps
    threshold = jnp.max(sigma, initial=0.0) * relative
    return jnp.where(num_rows >= 2, jnp.sum(sigma > threshold, dtype=jnp.float32), 0.0)


METRIC = Metric(of_spectrum=traditional_rank_of, min_tokens=2, needs_all_values=True)
