"""Growing prefixes of a response, and first and second order of a series measured on them.

With m_j the metric of the j-th prefix and delta_j = m_j - mean_{i<j} m_i,

  velocity = mean_{j>=2} delta_j,    acceleration = mean_{j>=3} (delta_j - delta_(j-1))
                                                  = (delta_K - delta_2) / (K - 2).
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from semrl_jax.metrics.inputs import Rows, check_choice, check_growth, check_stride
from semrl_jax.metrics.names import RELEASE_TOKENS, WINDOWS

FIRST_WINDOWS = 4  # always measured; the interpolation needs four points


class PrefixDynamics(NamedTuple):
    """A metric of one response and its two orders; all float32 scalars but the int32 count.

    Attributes:
      value: the metric of all valid rows.
      velocity: first order; valid from two windows on, 0.0 below.
      acceleration: second order; valid from three windows on, 0.0 below.
      num_windows: K, int32; 0 if a valid row is not finite.
    """

    value: Float[Array, ""]
    velocity: Float[Array, ""]
    acceleration: Float[Array, ""]
    num_windows: Int[Array, ""]


class Windows(NamedTuple):
    """The prefixes of one response.

    Attributes:
      rows: the rows that contain them: all, or the last 512 valid ones.
      sizes: static lengths, ascending; some may exceed the response.
      measured: static indices into sizes of the windows to measure. The last window of the response
        is measured too; the others are interpolated.
      num_windows: int32, how many of the sizes fit into this response.
      whole_last: whether the value of the whole response follows as one more point.
    """

    rows: Rows
    sizes: tuple[int, ...]
    measured: tuple[int, ...]
    num_windows: Int[Array, ""]
    whole_last: bool


def split_windows(rows: Rows, stride: int, window: str, growth: float = 1.0) -> Windows:
    """Fixes the prefixes of a response; see `rank_dynamics` for the rules."""
    check_choice("window", window, WINDOWS)
    stride, growth = check_stride(stride), check_growth(growth)
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
    measured = measured_windows(len(sizes), growth)
    return Windows(rows, sizes, measured, num_windows, window == "later")


def measured_windows(num_windows: int, growth: float) -> tuple[int, ...]:
    """Indices of the first four windows, then of each `growth` times as long as the last."""
    found, number = [], 1
    while number <= num_windows:
        found.append(number - 1)
        further = int(min(number * growth, num_windows + 1)) if number >= FIRST_WINDOWS else 0
        number = max(number + 1, further)
    return tuple(found)


def interpolated(
    values: Float[Array, "J M"],
    last: Float[Array, " M"],
    measured: tuple[int, ...],
    num_windows: Int[Array, ""],
    length: int,
) -> Float[Array, "K M"]:
    """Fills the windows between the measured ones: cubic in the logarithm of their number.

    A metric grows with the prefix like a power or a logarithm, which is smooth in that variable.
    `values` are of the measured windows, `last` of window `num_windows`; `length` is K. Entries
    past num_windows are finite.
    """
    # Numbers j of the measured windows. The last knot is a place for `last`, past all of them.
    knots = np.append(np.array(measured, np.int32) + 1, length)
    at_knots = jnp.log(jnp.minimum(knots, jnp.maximum(num_windows, 1)).astype(jnp.float32))
    values = jnp.concatenate([values, last[None]])
    values = jnp.where((knots < num_windows)[:, None], values, last[None])
    number = jnp.arange(1, length + 1)
    # Four knots around each window. None lies past the first knot that holds `last`.
    num_knots = jnp.minimum(jnp.searchsorted(knots, num_windows) + 1, len(knots))
    around = jnp.searchsorted(knots, number) - 2
    first = jnp.clip(around, 0, jnp.maximum(num_knots - 4, 0))
    index = first[:, None] + jnp.arange(4)[None]  # [K, 4]
    x, y = at_knots[index], values[index]
    distance = jnp.log(number.astype(jnp.float32))[:, None] - x
    total = jnp.zeros_like(y[:, 0])
    for i in range(4):
        others = [k for k in range(4) if k != i]
        weight = math.prod(distance[:, k] / (x[:, i] - x[:, k]) for k in others)
        total += weight[:, None] * y[:, i]
    exact = jnp.pad(values[:FIRST_WINDOWS], ((0, length - FIRST_WINDOWS), (0, 0)))
    between = (number > FIRST_WINDOWS)[:, None] & (number <= num_windows)[:, None]
    return jnp.where(between, total, exact)


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
    value: Float[Array, ""], series: Float[Array, " K"], windows: Windows
) -> PrefixDynamics:
    """First and second order of the valid head of a series."""
    series, num_windows = with_whole(windows, value, series)
    zero = jnp.float32(0)
    if series.shape[0] < 2:
        return PrefixDynamics(value, zero, zero, num_windows)
    index = jnp.arange(1, series.shape[0])
    earlier = jnp.cumsum(series)[:-1] / index.astype(jnp.float32)
    delta = series[1:] - earlier  # entry i is delta_(i + 2)
    count = num_windows - 1
    total = jnp.sum(jnp.where(index <= count, delta, 0.0))
    velocity = jnp.where(count >= 1, total / jnp.maximum(count, 1).astype(jnp.float32), zero)
    rise = delta[jnp.clip(count - 1, 0, delta.shape[0] - 1)] - delta[0]
    acceleration = jnp.where(count >= 2, rise / jnp.maximum(count - 1, 1).astype(jnp.float32), zero)
    return PrefixDynamics(value, velocity, acceleration, num_windows)


def chunks(num_windows: int, most: int) -> list[tuple[int, int]]:
    """Splits the windows into at most `most` runs of nearly equal length."""
    count = min(num_windows, most)
    edges = [num_windows * i // count for i in range(count + 1)] if count else []
    return list(itertools.pairwise(edges))
