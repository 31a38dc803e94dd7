"""Effective rank of one response: the effective number of directions of its states."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.metrics.inputs import AnyArray
from semrl_jax.metrics.kinds.log_effective_rank import (
    log_effective_rank_of,
    log_effective_rank_of_sums,
)
from semrl_jax.metrics.metric import Metric
from semrl_jax.metrics.nested import SpectralSums
from semrl_jax.metrics.prefixes import whole_response


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
    return whole_response(METRIC, hidden_states, response_mask, method)


def effective_rank_of(
    sigma: Float[Array, " S"], scale: Float[Array, ""], num_rows: Int[Array, ""], width: int
) -> Float[Array, ""]:
    """The exponential of `log_effective_rank_of`."""
    exponent = log_effective_rank_of(sigma, scale, num_rows, width)
    return jnp.where(num_rows >= 2, jnp.exp(exponent), 0.0)


def effective_rank_of_sums(
    sums: SpectralSums, scale: Float[Array, ""], num_rows: Int[Array, " *K"], width: int
) -> Float[Array, " *K"]:
    """The exponential of `log_effective_rank_of_sums`."""
    exponent = log_effective_rank_of_sums(sums, scale, num_rows, width)
    return jnp.where(num_rows >= 2, jnp.exp(exponent), 0.0)


METRIC = Metric(of_spectrum=effective_rank_of, of_sums=effective_rank_of_sums, min_tokens=2)
