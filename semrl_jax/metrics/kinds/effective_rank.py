"""Effective rank: the effective number of directions that the states of a response span.

p_k = sigma_k / (sum sigma + 1e-8),  ER = exp(-sum p_k log(p_k + 1e-8))

sigma are the singular values of the mean-centred valid rows.

In [1, min(T - 1, D)] for T valid tokens if sum sigma is well above 1e-8; 1.0 if all rows are equal;
0.0 if T < 2. The relative error is 1e-5 with "svd" and 1e-3 with "gram".

Source: Roy and Vetterli 2007; arXiv:2509.23808 for hidden states of a response.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from semrl_jax.metrics.kinds.log_effective_rank import (
    log_effective_rank_of,
    log_effective_rank_of_sums,
)
from semrl_jax.metrics.metric import Metric
from semrl_jax.metrics.nested import SpectralSums


def effective_rank_of(
    sigma: Float[Array, " S"], scale: Float[Array, ""], num_rows: Int[Array, ""], width: int
) -> Float[Array, ""]:
    exponent = log_effective_rank_of(sigma, scale, num_rows, width)
    return jnp.where(num_rows >= 2, jnp.exp(exponent), 0.0)


def effective_rank_of_sums(
    sums: SpectralSums, scale: Float[Array, ""], num_rows: Int[Array, " *K"], width: int
) -> Float[Array, " *K"]:
    exponent = log_effective_rank_of_sums(sums, scale, num_rows, width)
    return jnp.where(num_rows >= 2, jnp.exp(exponent), 0.0)


METRIC = Metric(of_spectrum=effective_rank_of, of_sums=effective_rank_of_sums, min_tokens=2)
