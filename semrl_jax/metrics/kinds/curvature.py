"""Curvature: how sharply the path of hidden states turns from token to token.

v_t = z_(t+1) - z_t without those of norm <= 1e-6; the mean over t of arccos cos(v_t, v_(t+1)).
The rows z are not centred, and a step leads from one valid row to the next.

In radians in [0, pi]; 0.0 if fewer than two steps remain.

Source: the reference implementation, which works in bfloat16 and omits the pairs at every 256th
step. This function does neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.metrics.metric import Metric
from semrl_jax.metrics.valid_rows import Rows

MIN_STEP = 1e-6  # a step of at most this length has no direction
BLOCK_STEPS = 64  # with 3584 dimensions they fit in the cache of a core


def prefix_curvature(rows: Rows) -> Callable[[Int[Array, ""]], Float[Array, ""]]:
    angles, exists = turning_angles(rows)

    def of_first(num_rows: Int[Array, ""]) -> Float[Array, ""]:
        kept = exists & (jnp.arange(angles.shape[0]) < num_rows - 1)
        count = jnp.sum(kept, dtype=jnp.float32)
        return jnp.sum(jnp.where(kept, angles, 0.0)) / jnp.maximum(count, 1.0)

    return of_first


def turning_angles(rows: Rows) -> tuple[Float[Array, " N"], Bool[Array, " N"]]:
    """The angle between each step and the last earlier step with a direction; whether it exists.

    Entry t belongs to the step from row t to row t + 1; N = max(T - 1, 0).
    """
    states, num_tokens = rows.states, rows.num_tokens
    num_steps = max(states.shape[0] - 1, 0)
    if num_steps == 0:
        return jnp.zeros(num_steps, jnp.float32), jnp.zeros(num_steps, bool)
    position = jnp.arange(num_steps)
    # In blocks of steps, so that no array of the size of the states is written.
    by_blocks = functools.partial(jax.lax.map, batch_size=min(BLOCK_STEPS, num_steps))

    def step(t: Int[Array, ""]) -> Float[Array, " D"]:
        return states[t + 1] - states[t]

    def norm(t: Int[Array, ""]) -> Float[Array, ""]:
        largest = jnp.max(jnp.abs(step(t)))  # the squares of small steps could underflow
        ratios = step(t) / jnp.where(largest > 0, largest, 1.0)
        return largest * jnp.sqrt(jnp.sum(ratios**2))

    norms = by_blocks(norm, position)
    directed = (norms > MIN_STEP / rows.scale) & (norms > 0) & (position < num_tokens - 1)
    lengths = jnp.where(directed, norms, 1.0)
    last = jax.lax.cummax(jnp.where(directed, position, -1))
    before = jnp.concatenate([jnp.full(1, -1, last.dtype), last[:-1]])

    def angle(t: Int[Array, ""], earlier: Int[Array, ""]) -> Float[Array, ""]:
        unit, previous = step(t) / lengths[t], step(earlier) / lengths[earlier]
        # The half-angle form of arccos(cos): arccos loses half of the digits near 0 and pi.
        difference = jnp.sqrt(jnp.sum((unit - previous) ** 2))
        return 2.0 * jnp.arctan2(difference, jnp.sqrt(jnp.sum((unit + previous) ** 2)))

    angles = by_blocks(lambda pair: angle(*pair), (position, jnp.maximum(before, 0)))
    return angles, directed & (before >= 0)


METRIC = Metric(of_states=prefix_curvature, min_tokens=3)
