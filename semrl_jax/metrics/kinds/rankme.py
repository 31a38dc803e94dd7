"""RankMe: the effective rank of a response without centring.

exp(-sum p log p), p_k = sigma_k / sum sigma + 1e-7, where sigma are the min(T, D) singular values
of the valid rows, not centred. A common offset of the rows is one strong direction, so that RankMe
is usually far below `effective_rank`.

From 1 to min(T, D), up to the 1e-7; 0.0 if T < 2 or if all rows are zero.

Source: arXiv:2210.02885, which measures the representations of a data set.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from semrl_jax.metrics.metric import Metric

EPSILON = 1e-7  # of the paper, for float32


def rankme_of(
    sigma: Float[Array, " S"], scale: Float[Array, ""], num_rows: Int[Array, ""], width: int
) -> Float[Array, ""]:
    """RankMe of a spectrum; sigma in any unit."""
    total = jnp.sum(sigma)
    # Each singular value of zero adds 1e-7 log 1e7: padding must add none.
    exists = jnp.arange(sigma.shape[0]) < jnp.minimum(num_rows, width)
    p = jnp.where(exists, sigma / jnp.where(total > 0, total, 1.0) + EPSILON, 1.0)
    rank = jnp.exp(-jnp.sum(p * jnp.log(p)))
    return jnp.where((num_rows >= 2) & (total > 0), rank, 0.0)


METRIC = Metric(of_spectrum=rankme_of, centred=False, min_tokens=2)
