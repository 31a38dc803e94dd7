"""Participation ratio: the number of directions that share the variance of a response.

(sum lambda)^2 / sum lambda^2, lambda the eigenvalues of the covariance. It is the exponential of
the Renyi entropy of order 2 of lambda / sum lambda.

In [1, min(T - 1, D)]; 0.0 if T < 2 or if all rows are equal.

Source: Gao et al. 2017, doi:10.1101/214262.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from semrl_jax.metrics.metric import Metric


def participation_ratio_of(
    sigma: Float[Array, " S"], scale: Float[Array, ""], num_rows: Int[Array, ""], width: int
) -> Float[Array, ""]:
    """Participation ratio of a spectrum; sigma in any unit."""
    largest = jnp.max(sigma, initial=0.0)
    eigenvalues = (sigma / jnp.where(largest > 0, largest, 1.0)) ** 2
    squares = jnp.sum(eigenvalues**2)
    ratio = jnp.sum(eigenvalues) ** 2 / jnp.where(squares > 0, squares, 1.0)
    return jnp.where(num_rows >= 2, ratio, 0.0)


METRIC = Metric(of_spectrum=participation_ratio_of, min_tokens=2)
