"""Intrinsic dimension of a response by the distances to two nearest neighbours (TwoNN).

(N - 1) / sum_i log(r_i2 / r_i1), where r_i1 and r_i2 are the distances of row i to its nearest and
second nearest neighbours. If the N rows fill a manifold of d dimensions evenly on that scale,
r_i2 / r_i1 has a Pareto distribution of exponent d, and this is its unbiased estimate. Of equal
rows, only the first counts. Computed in float64.

Above 0; 0.0 if fewer than three different rows remain, or if all ratios are one.

Source: Facco et al. 2017, arXiv:1803.06992, who fit the distribution of the ratios by a line; the
estimate in closed form is that of Denti et al., arXiv:2104.13832.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from semrl_jax.metrics.directions import of_prefixes
from semrl_jax.metrics.metric import Metric
from semrl_jax.metrics.spectrum import symmetric_product, with_float64
from semrl_jax.metrics.valid_rows import Rows, anchor

# Rows closer than this share of their lengths count as equal: 3e-7, what float32 resolves.
EQUAL = 1e-13


def prefix_dimension(rows: Rows) -> Callable[[Int[Array, ""]], Float[Array, ""]]:
    if rows.states.shape[0] < 3:
        return of_prefixes(jnp.zeros(rows.states.shape[0], jnp.float32))
    return of_prefixes(with_float64(_dimensions)(rows))


def _dimensions(rows: Rows) -> Float[Array, " T"]:
    """The dimension of every prefix, in one pass: each row may be a neighbour of earlier ones."""
    num_rows = rows.states.shape[0]
    states = anchor(rows._replace(states=rows.states.astype(jnp.float64)), num_rows)
    gram = symmetric_product(states)
    squares = jnp.diagonal(gram)
    both = squares[:, None] + squares[None]
    distances = jnp.maximum(both - 2.0 * gram, 0.0)  # squared
    position = jnp.arange(num_rows)
    earlier = position[None] < position[:, None]
    equal = jnp.any(earlier & (distances <= EQUAL * both), axis=1)
    counts = (position < rows.num_tokens) & ~equal
    distances = jnp.where(earlier & counts[:, None] & counts[None], distances, jnp.inf)

    def add(nearest: tuple[Array, Array], row: tuple[Array, Array]) -> tuple[tuple, Array]:
        first, second = nearest
        index, to_row = row
        second = jnp.where(to_row < first, first, jnp.minimum(second, to_row))
        first = jnp.minimum(first, to_row)
        own = -jax.lax.top_k(-to_row, 2)[0]
        first, second = first.at[index].set(own[0]), second.at[index].set(own[1])
        known = jnp.isfinite(second)
        logs = jnp.log(jnp.where(known, second / jnp.where(known, first, 1.0), 1.0)) / 2
        total, count = jnp.sum(logs), jnp.sum(known)
        value = (count - 1) / jnp.where(total > 0, total, 1.0)
        return (first, second), jnp.where(total > 0, value, 0.0)

    start = (jnp.full(num_rows, jnp.inf), jnp.full(num_rows, jnp.inf))
    return jax.lax.scan(add, start, (position, distances))[1].astype(jnp.float32)


METRIC = Metric(of_states=prefix_dimension, min_tokens=3)
