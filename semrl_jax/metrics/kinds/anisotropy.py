"""Anisotropy: how much the states of a response point into one direction, the mean cosine of pairs.

With u_t = z_t / |z_t| of the T rows z_t that are not zero, not centred, the mean cosine of all
pairs of different rows is (|sum u|^2 - T) / (T (T - 1)), which needs no pairs.

In [-1 / (T - 1), 1]; 0.0 below two such rows.

Source: arXiv:1909.00512, which samples pairs of words.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from semrl_jax.metrics.directions import of_prefixes, unit_rows
from semrl_jax.metrics.metric import Metric
from semrl_jax.metrics.valid_rows import Rows


def prefix_anisotropy(rows: Rows) -> Callable[[Int[Array, ""]], Float[Array, ""]]:
    units, directed = unit_rows(rows.states)
    sums = jnp.cumsum(units, axis=0)
    count = jnp.cumsum(directed, dtype=jnp.float32)
    pairs = count * (count - 1.0)  # ordered
    cosines = (jnp.sum(sums**2, axis=1) - count) / jnp.maximum(pairs, 1.0)
    return of_prefixes(jnp.where(pairs > 0, cosines, 0.0))


METRIC = Metric(of_states=prefix_anisotropy, min_tokens=2)
