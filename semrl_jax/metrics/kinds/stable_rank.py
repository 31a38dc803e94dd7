"""Stable rank: the energy of a response divided by the energy of its strongest direction.

sum sigma^2 / max sigma^2, sigma the singular values of the centred rows.

In [1, min(T - 1, D)]; 0.0 if T < 2 or if all rows are equal.

Source: Rudelson and Vershynin, arXiv:math/0503442, who take any matrix; the rows are centred here,
as for `effective_rank`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from semrl_jax.metrics.metric import Metric


def stable_rank_of(
    sigma: Float[Array, " S"], scale: Float[Array, ""], num_rows: Int[Array, ""], width: int
) -> Float[Array, ""]:
    """Stable rank of a spectrum; sigma in any unit."""
    largest = jnp.max(sigma, initial=0.0)
    ratios = sigma / jnp.where(largest > 0, largest, 1.0)
    return jnp.where(num_rows >= 2, jnp.sum(ratios**2), 0.0)


METRIC = Metric(of_spectrum=stable_rank_of, min_tokens=2)
