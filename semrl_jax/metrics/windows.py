"""Growing prefixes of a response, and first and second order of a series measured on them.

With m_j the metric of the j-th prefix and delta_j = m_j - mean_{i<j} m_i,

  velocity = mean_{j>=2} delta_j,    acceleration = mean_{j>=3} (delta_j - delta_(j-1))
                                                  = (delta_K - delta_2) / (K - 2).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from semrl_jax.metrics.names import RELEASE_TOKENS
from semrl_jax.metrics.valid_rows import Rows


class Windows(NamedTuple):
    """The prefixes of one response."""

    rows: Rows  # the rows that contain them: all, or the last 512 valid ones
    sizes: tuple[int, ...]  # static lengths, ascending; some may exceed the response
    num_windows: Int[Array, ""]  # int32, how many of the sizes fit into this response
    whole_last: bool  # whether the value of the whole response follows as one more point


def split_windows(rows: Rows, stride: int, window: str) -> Windows:
    """Fixes the prefixes of a response; see `rank_dynamics` for the rules."""
    num_rows = rows.states.shape[0]
    stride = min(stride, num_rows + 1)  # also without a window, and fits in an int32
    num_tokens = jnp.where(rows.finite, rows.num_tokens, 0)
    if window == "exact":
        sizes = tuple(range(stride, num_rows + 1, stride))
        num_windows = num_tokens // stride
    else:
        if window == "release" and num_rows > RELEASE_TOKENS:
            start = jnp.maximum(rows.num_tokens - RELEASE_TOKENS, 0)
            last = jax.lax.dynamic_slice_in_dim(rows.states, start, RELEASE_TOKENS)
            kept = jnp.minimum(rows.num_tokens, RELEASE_TOKENS)
            rows = rows._replace(states=last, num_tokens=kept)
            num_tokens = jnp.minimum(num_tokens, RELEASE_TOKENS)
        sizes = tuple(range(stride + 1, rows.states.shape[0] + 1, stride))
        num_windows = jnp.where(num_tokens >= 2 * stride, (num_tokens - 1) // stride, 0)
    return Windows(rows, sizes, num_windows, window == "later")


def with_whole(
    windows: Windows, value: Num[Array, ""], series: Num[Array, " K"]
) -> tuple[Num[Array, " _"], Int[Array, ""]]:
    """Appends the value of the whole response if the rule asks for it; returns the new length."""
    num_windows = windows.num_windows
    if windows.whole_last:
        series = jnp.append(series, jnp.zeros((), series.dtype))
        series = jnp.where(jnp.arange(series.shape[0]) == num_windows, value, series)
        num_windows = jnp.where(num_windows > 0, num_windows + 1, 0)
    return series, num_windows


def summarise(
    series: Float[Array, " K"], num_windows: Int[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Velocity and acceleration of the first `num_windows` values; 0.0 if there are too few."""
    zero = jnp.float32(0)
    if series.shape[0] < 2:
        return zero, zero
    index = jnp.arange(1, series.shape[0])
    earlier = jnp.cumsum(series)[:-1] / index.astype(jnp.float32)
    delta = series[1:] - earlier  # entry i is delta_(i + 2)
    count = num_windows - 1
    total = jnp.sum(jnp.where(index <= count, delta, 0.0))
    velocity = jnp.where(count >= 1, total / jnp.maximum(count, 1).astype(jnp.float32), zero)
    rise = delta[jnp.clip(count - 1, 0, delta.shape[0] - 1)] - delta[0]
    acceleration = jnp.where(count >= 2, rise / jnp.maximum(count - 1, 1).astype(jnp.float32), zero)
    return velocity, acceleration


def chunks(num_windows: int, most: int) -> list[tuple[int, int]]:
    """Splits the windows into at most `most` runs of nearly equal length."""
    count = min(num_windows, most)
    edges = [num_windows * i // count for i in range(count + 1)] if count else []
    return list(itertools.pairwise(edges))
