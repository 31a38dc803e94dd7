"""Uniformity: how evenly the states of a response cover the unit sphere. Lower is more even.

log of the mean of exp(-2 |u - v|^2) over all pairs of different rows, not centred and divided by
their lengths, so |u - v|^2 = 2 - 2 cos(u, v). Rows of zeros have no direction and are left out.

In [-8, 0], 0 if all rows have one direction; 0.0 also if fewer than two rows remain.

Source: arXiv:2005.10242 with t = 2; of positive pairs, which the paper also has, a response has
none.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from semrl_jax.metrics.directions import of_prefixes, unit_rows
from semrl_jax.metrics.metric import Metric
from semrl_jax.metrics.spectrum import symmetric_product
from semrl_jax.metrics.valid_rows import Rows

TEMPERATURE = 2.0  # t of the paper


def prefix_uniformity(rows: Rows) -> Callable[[Int[Array, ""]], Float[Array, ""]]:
    units, directed = unit_rows(rows.states)
    cosines = jnp.clip(symmetric_product(units), -1.0, 1.0)
    counted = jnp.tril(directed[:, None] & directed[None], -1)
    values = jnp.where(counted, jnp.exp(-2.0 * TEMPERATURE * (1.0 - cosines)), 0.0)
    total = jnp.cumsum(jnp.sum(values, axis=1))
    pairs = jnp.cumsum(jnp.sum(counted, axis=1, dtype=jnp.float32))
    mean = jnp.where(pairs > 0, total / jnp.maximum(pairs, 1.0), 1.0)
    return of_prefixes(jnp.log(jnp.minimum(mean, 1.0)))


METRIC = Metric(of_states=prefix_uniformity, min_tokens=2)
