"""First and second order of a metric over growing prefixes of one response.

With m_j the metric of the j-th prefix and delta_j = m_j - mean_{i<j} m_i,

  velocity = mean_{j>=2} delta_j,    acceleration = mean_{j>=3} (delta_j - delta_(j-1))
                                                  = (delta_K - delta_2) / (K - 2).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.metrics.inputs import (
    METHODS,
    WINDOWS,
    AnyArray,
    Rows,
    anchor,
    check_choice,
    check_stride,
    compact,
)
from semrl_jax.metrics.rank import effective_rank_of
from semrl_jax.metrics.spectrum import PrefixSpectra, one_by_one

RELEASE_TOKENS = 512
MAX_UNROLLED_WINDOWS = 16  # more are padded to this many sizes, which bounds the compile time


class PrefixDynamics(NamedTuple):
    """A metric of one response and its two orders; all float32 scalars but the int32 count.

    Attributes:
      value: the metric of all valid rows.
      velocity: first order; 0.0 with fewer than two windows.
      acceleration: second order; 0.0 with fewer than three windows.
      num_windows: K, int32; velocity is valid from 2 on, acceleration from 3 on. 0 if a valid row
        is not finite.
    """

    value: Float[Array, ""]
    velocity: Float[Array, ""]
    acceleration: Float[Array, ""]
    num_windows: Int[Array, ""]


class RankDynamics(NamedTuple):
    """Effective rank (ER) and its two orders (ERV, ERA), as in `PrefixDynamics`."""

    effective_rank: Float[Array, ""]
    effective_rank_velocity: Float[Array, ""]
    effective_rank_acceleration: Float[Array, ""]
    num_windows: Int[Array, ""]


class Windows(NamedTuple):
    """The prefixes of one response.

    Attributes:
      rows: the rows they are prefixes of: all, or the last 512 valid ones.
      sizes: static lengths, ascending; those a response is too short for come last.
      num_windows: int32, how many sizes this response has.
      whole_last: whether the value of the whole response follows as one more point.
    """

    rows: Rows
    sizes: tuple[int, ...]
    num_windows: Int[Array, ""]
    whole_last: bool


def rank_dynamics(
    hidden_states: Float[AnyArray, "T D"],
    response_mask: Bool[AnyArray, " T"],
    *,
    stride: int,
    window: str = "exact",
    method: str = "svd",
) -> RankDynamics:
    """Computes the effective rank of a response, its velocity and its acceleration.

    Args:
      hidden_states: any real float dtype, computed in float32; rows outside the mask may hold
        anything, NaN too.
      response_mask: True on tokens that count; holes are allowed, valid rows keep their order.
      stride: tokens between two prefixes, at least 1; ERA needs three strides of tokens.
      window: "exact": prefixes of exactly j * stride tokens of the whole response. "release": of
        the last 512 valid tokens, t + 1 tokens at t = stride, 2 stride, ... below their number,
        none if that is below 2 stride. "later": as "release" without the 512, and the value of the
        whole response as one last point.
      method: as in `effective_rank`.

    Returns:
      Float32 scalars; an order is 0.0 below its number of windows (see `PrefixDynamics`).

    Raises:
      ValueError: for a wrong rank, shape, dtype, stride, window or method.

    Source: arXiv:2509.23808. The paper's own window rule could not be read: "exact" is ours,
    "release" is what the reference implementation does, "later" what its later revisions do.
    """
    check_choice("method", method, METHODS)
    rows = compact(hidden_states, response_mask)
    windows = split_windows(rows, stride, window)
    metrics, exact = (effective_rank_of,), method == "svd"
    value, series = spectral_series(
        rows, windows, metrics, metrics, exact_value=exact, exact_series=exact
    )
    return RankDynamics(*summarise(value[0], series[:, 0], windows))


def prefix_dynamics(
    metric: Callable[[Float[Array, "T D"], Bool[Array, " T"]], Float[Array, ""]],
    hidden_states: Float[AnyArray, "T D"],
    response_mask: Bool[AnyArray, " T"],
    *,
    stride: int,
    window: str = "exact",
) -> PrefixDynamics:
    """Computes first and second order of any metric of (hidden_states, response_mask).

    Evaluates the metric anew on every prefix, one after the other; `rank_dynamics` and
    `hidden_state_metrics` share the work between prefixes. Arguments, errors and windows as in
    `rank_dynamics`. A response with a valid row that is not finite gives zeros.
    """
    rows = compact(hidden_states, response_mask)
    windows = split_windows(rows, stride, window)

    def of_first(rows: Rows, num_rows: Int[Array, ""]) -> Float[Array, ""]:
        valid = jnp.arange(rows.states.shape[0]) < num_rows
        return jnp.asarray(metric(rows.states * rows.scale, valid), jnp.float32)

    value = jnp.where(rows.finite, of_first(rows, rows.num_tokens), 0.0)
    sizes = jnp.asarray(windows.sizes, jnp.int32)
    series = jax.lax.map(lambda size: of_first(windows.rows, size), sizes)
    return summarise(value, series, windows)


def split_windows(rows: Rows, stride: int, window: str) -> Windows:
    """Fixes the prefixes of a response; see `rank_dynamics` for the rules."""
    check_choice("window", window, WINDOWS)
    stride = check_stride(stride)
    num_rows = rows.states.shape[0]
    num_tokens = jnp.where(rows.finite, rows.num_tokens, 0)
    if window == "exact":
        sizes = tuple(range(stride, num_rows + 1, stride))
        return Windows(rows, sizes, num_tokens // stride, False)
    if window == "release" and num_rows > RELEASE_TOKENS:
        start = jnp.maximum(rows.num_tokens - RELEASE_TOKENS, 0)
        last = jax.lax.dynamic_slice_in_dim(rows.states, start, RELEASE_TOKENS)
        rows = rows._replace(states=last, num_tokens=jnp.minimum(rows.num_tokens, RELEASE_TOKENS))
        num_tokens = jnp.minimum(num_tokens, RELEASE_TOKENS)
    sizes = tuple(range(stride + 1, rows.states.shape[0] + 1, stride))
    num_windows = jnp.where(num_tokens >= 2 * stride, (num_tokens - 1) // stride, 0)
    return Windows(rows, sizes, num_windows, window == "later")


def summarise(
    value: Float[Array, ""], series: Float[Array, " K"], windows: Windows
) -> PrefixDynamics:
    """First and second order of the valid head of a series."""
    num_windows = windows.num_windows
    if windows.whole_last:
        series = jnp.append(series, 0.0)
        series = jnp.where(jnp.arange(series.shape[0]) == num_windows, value, series)
        num_windows = jnp.where(num_windows > 0, num_windows + 1, 0)
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


def spectral_series(
    rows: Rows,
    windows: Windows,
    value_metrics: tuple[Callable, ...],
    series_metrics: tuple[Callable, ...],
    *,
    exact_value: bool,
    exact_series: bool,
) -> tuple[Float[Array, " V"], Float[Array, "K M"]]:
    """Functions of the spectrum: of the whole response, and of every window.

    One Gram matrix, and one decomposition a window, serve all metrics; windows beyond the response
    cost nothing. `exact_value` and `exact_series` ask for float64 decompositions; one of them makes
    the Gram matrix float64 too.
    """
    num_rows, width = rows.states.shape
    if min(num_rows, width) == 0:
        return jnp.zeros(len(value_metrics)), jnp.zeros((len(windows.sizes), len(series_metrics)))
    measure = one_by_one(
        _measure,
        sizes=windows.sizes,
        window_rows=windows.rows.states.shape[0],
        value_metrics=value_metrics,
        series_metrics=series_metrics,
        value_dtype=jnp.float64 if exact_value else jnp.float32,
        series_dtype=jnp.float64 if exact_series else jnp.float32,
    )
    return measure(rows, windows.rows.num_tokens, windows.num_windows)


def _measure(
    rows: Rows,
    window_tokens: Int[Array, ""],
    num_windows: Int[Array, ""],
    *,
    sizes: tuple[int, ...],
    window_rows: int,
    value_metrics: tuple[Callable, ...],
    series_metrics: tuple[Callable, ...],
    value_dtype: type,
    series_dtype: type,
) -> tuple[Float[Array, " V"], Float[Array, "K M"]]:
    """`spectral_series` of rows of which the last `window_tokens` valid ones have windows."""
    num_rows, width = rows.states.shape
    states = rows.states.astype(jnp.promote_types(value_dtype, series_dtype))
    first_row = rows.num_tokens - window_tokens
    first_size = sizes[0] if sizes else num_rows
    whole = PrefixSpectra(anchor(rows._replace(states=states), first_size, first_row))
    prefixes = whole if window_rows == num_rows else whole.part(first_row, window_rows)

    def of_first(spectra, size, num_tokens, active, metrics, dtype) -> Float[Array, " M"]:
        sigma = spectra(size, num_tokens, active & (num_tokens >= 2), jnp.dtype(dtype))
        values = [metric(sigma, rows.scale, num_tokens, width) for metric in metrics]
        return jnp.where(active, jnp.stack(values), 0.0)

    values = jnp.zeros(0, jnp.float32)
    if value_metrics:
        values = of_first(
            whole, num_rows, rows.num_tokens, rows.finite, value_metrics, value_dtype
        )  # [V]
    series = [jnp.zeros((0 if series_metrics else len(sizes), len(series_metrics)), jnp.float32)]
    for start, stop in _chunks(len(sizes)) if series_metrics else ():
        chunk = jnp.arange(start, stop), jnp.asarray(sizes[start:stop], jnp.int32)

        def one(index_and_size: tuple[Array, Array], size: int = sizes[stop - 1]):
            index, num_tokens = index_and_size
            active = index < num_windows
            return of_first(prefixes, size, num_tokens, active, series_metrics, series_dtype)

        if stop - start == 1:
            series.append(one((chunk[0][0], chunk[1][0]))[None])
        else:
            series.append(jax.lax.map(one, chunk))
    return values, jnp.concatenate(series)  # [V], [K, M]


def _chunks(num_windows: int) -> list[tuple[int, int]]:
    """Splits the windows into at most MAX_UNROLLED_WINDOWS runs of nearly equal length."""
    count = min(num_windows, MAX_UNROLLED_WINDOWS)
    edges = [num_windows * i // count for i in range(count + 1)] if count else []
    return list(itertools.pairwise(edges))
