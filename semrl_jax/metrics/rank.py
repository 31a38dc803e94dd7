"""Effective and traditional rank of one response."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.choices import METHODS
from semrl_jax.metrics.inputs import AnyArray, check_choice, compact
from semrl_jax.metrics.prefixes import SpectralMetric, spectral_value

EPSILON = 1e-8  # in units of the hidden states, as the reference implementation has it


def effective_rank(
    hidden_states: Float[AnyArray, "T D"],
    response_mask: Bool[AnyArray, " T"],
    *,
    method: str = "svd",
) -> Float[Array, ""]:
    """Computes the effective number of directions the hidden states of a response span.

    p_k = sigma_k / (sum sigma + 1e-8),  ER = exp(-sum p_k log(p_k + 1e-8))

    sigma are the singular values of the mean-centred valid rows.

    Args:
      hidden_states: any real float dtype, computed in float32; row t gave response token t. Rows
        outside the mask may hold anything, NaN too.
      response_mask: True on tokens that count; holes are allowed, valid rows keep their order.
      method: "svd": singular values from eigenvalues of a Gram matrix in float64, or from the rows
        where one is below 3e-5 of the largest; relative error 1e-5. "gram": from a Gram matrix in
        float32, and again in float64 where that does not resolve them; relative error 1e-3.

    Returns:
      Float32 in [1, min(T - 1, D)] for T valid tokens if sum sigma is well above 1e-8; 1.0 if all
      rows are equal; 0.0 if T < 2 or a valid row is not finite.

    Raises:
      ValueError: for a wrong rank, shape, dtype or method.

    Source: Roy and Vetterli 2007; arXiv:2509.23808 for hidden states of a response.
    """
    return whole_response(effective_rank_of, hidden_states, response_mask, method)


def log_effective_rank(
    hidden_states: Float[AnyArray, "T D"],
    response_mask: Bool[AnyArray, " T"],
    *,
    method: str = "svd",
) -> Float[Array, ""]:
    """Computes log ER in nats; arguments and zeros as in `effective_rank`.

    The relative error is 1e-5 under "svd"; under "gram" the absolute one is 1e-3.
    """
    return whole_response(log_effective_rank_of, hidden_states, response_mask, method)


def traditional_rank(
    hidden_states: Float[AnyArray, "T D"], response_mask: Bool[AnyArray, " T"]
) -> Float[Array, ""]:
    """Counts singular values above sigma_max * max(T, D) * eps of float32, T valid tokens.

    In float64: the noise of float32 Gram eigenvalues lies above this threshold. Arguments, errors
    and zeros as in `effective_rank`; 0.0 also if all rows are equal, or below 1.2e-38.
    """
    return whole_response(traditional_rank_of, hidden_states, response_mask, "svd")


def log_effective_rank_of(
    sigma: Float[Array, " S"], scale: Float[Array, ""], num_rows: Int[Array, ""], width: int
) -> Float[Array, ""]:
    """Entropy of the normalised spectrum, in nats; sigma in units of `scale`."""
    total = jnp.sum(sigma) + EPSILON / scale
    p = sigma / jnp.where(total > 0, total, 1.0)  # a huge scale leaves nothing of the 1e-8
    entropy = jnp.abs(jnp.sum(p * jnp.log(p + EPSILON)))  # of no sign: 0.0, never -0.0
    return jnp.where(num_rows >= 2, entropy, 0.0)


def effective_rank_of(
    sigma: Float[Array, " S"], scale: Float[Array, ""], num_rows: Int[Array, ""], width: int
) -> Float[Array, ""]:
    """Exponential of the above."""
    exponent = log_effective_rank_of(sigma, scale, num_rows, width)
    return jnp.where(num_rows >= 2, jnp.exp(exponent), 0.0)


def traditional_rank_of(
    sigma: Float[Array, " S"], scale: Float[Array, ""], num_rows: Int[Array, ""], width: int
) -> Float[Array, ""]:
    """Singular values above the float32 noise of a matrix of this size."""
    relative = jnp.maximum(num_rows, width).astype(jnp.float32) * jnp.finfo(jnp.float32).eps
    threshold = jnp.max(sigma, initial=0.0) * relative
    return jnp.where(num_rows >= 2, jnp.sum(sigma > threshold, dtype=jnp.float32), 0.0)


def whole_response(
    metric: SpectralMetric,
    hidden_states: Float[AnyArray, "T D"],
    response_mask: Bool[AnyArray, " T"],
    method: str,
) -> Float[Array, ""]:
    """Applies a function of the spectrum to all valid rows."""
    check_choice("method", method, METHODS)
    return spectral_value(compact(hidden_states, response_mask), metric, method=method)
