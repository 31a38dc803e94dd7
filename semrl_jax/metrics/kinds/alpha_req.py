"""alpha-ReQ: how fast the eigenvalues of the covariance fall.

alpha is the exponent of lambda_j ~ j^-alpha, fitted to the descending eigenvalues: minus the slope
of the least-squares line of log lambda_j over log j, with weights 1 / j, so that each octave of j
counts the same. The eigenvalues are those of singular values above sigma_max * max(T, D) * eps of
float32, as counted by `traditional_rank`.

At least 0: 0 for equal eigenvalues. 0.0 if T < 3 or if fewer than two eigenvalues are above
rounding.

Source: Agrawal et al. 2022 (arXiv:2202.05808), with the weighted fit of Stringer et al. 2019. They
fit a fixed range of j in data sets; a response has too few eigenvalues for that, so all are used
here.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from semrl_jax.metrics.metric import Metric


def alpha_req_of(
    sigma: Float[Array, " S"], scale: Float[Array, ""], num_rows: Int[Array, ""], width: int
) -> Float[Array, ""]:
    """Decay of a descending spectrum; sigma in any unit."""
    relative = jnp.maximum(num_rows, width).astype(jnp.float32) * jnp.finfo(jnp.float32).eps
    largest = jnp.max(sigma, initial=0.0)
    above = sigma > largest * relative
    y = 2.0 * jnp.log(jnp.where(above, sigma / jnp.where(largest > 0, largest, 1.0), 1.0))
    position = jnp.arange(1, sigma.shape[0] + 1).astype(sigma.dtype)
    x = jnp.log(position)
    weights = jnp.where(above, 1.0 / position, 0.0)
    total = jnp.maximum(jnp.sum(weights), 1.0)  # at least 1 if there is an eigenvalue
    x = x - jnp.sum(weights * x) / total
    y = y - jnp.sum(weights * y) / total
    spread = jnp.sum(weights * x**2)
    enough = (num_rows >= 3) & (jnp.sum(above) >= 2)
    slope = jnp.sum(weights * x * y) / jnp.where(enough, spread, 1.0)
    return jnp.where(enough, jnp.abs(slope), 0.0)  # 0.0, never -0.0


METRIC = Metric(of_spectrum=alpha_req_of, min_tokens=3, needs_all_values=True)
