"""Straightness: how directly the states of a response lead from the first to the last.

|z_T - z_1| / sum_t |z_(t+1) - z_t|, net displacement over the length of the path. `curvature` is
its local counterpart: the mean angle between successive steps, by which arXiv:2311.04930 measures
how straight the path of a sentence is.

In [0, 1], 1 for a straight line; 0.0 if T < 2 or if all rows are equal.

Source: the straightness index of Batschelet 1981, see Benhamou 2004,
doi:10.1016/j.jtbi.2004.03.016.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from semrl_jax.metrics.directions import of_prefixes, row_lengths
from semrl_jax.metrics.metric import Metric
from semrl_jax.metrics.valid_rows import Rows


def prefix_straightness(rows: Rows) -> Callable[[Int[Array, ""]], Float[Array, ""]]:
    states = rows.states
    steps = jnp.diff(states, axis=0, prepend=states[:1])  # the first one is zero
    valid = jnp.arange(states.shape[0]) < rows.num_tokens
    path = jnp.cumsum(jnp.where(valid, row_lengths(steps), 0.0))
    displacement = row_lengths(states - states[:1])
    ratio = displacement / jnp.where(path > 0, path, 1.0)
    return of_prefixes(jnp.minimum(ratio, 1.0))


METRIC = Metric(of_states=prefix_straightness, min_tokens=2)
