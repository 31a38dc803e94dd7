"""First and second order of a metric over growing prefixes of one response; see `windows`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.metrics.inputs import AnyArray, Rows, check_choice, compact
from semrl_jax.metrics.kinds.effective_rank import METRIC
from semrl_jax.metrics.names import METHODS
from semrl_jax.metrics.prefixes import spectral_series
from semrl_jax.metrics.windows import PrefixDynamics, Windows, split_windows, summarise, with_whole


class RankDynamics(NamedTuple):
    """Effective rank (ER) and its two orders (ERV, ERA), as in `PrefixDynamics`."""

    effective_rank: Float[Array, ""]
    effective_rank_velocity: Float[Array, ""]
    effective_rank_acceleration: Float[Array, ""]
    num_windows: Int[Array, ""]


class RankSeries(NamedTuple):
    """Effective rank along a response, zeros past `num_windows`.

    Attributes:
      effective_rank: float32, of each prefix.
      num_tokens: int32, length of each prefix.
      num_windows: int32, how many there are; 0 if a valid row is not finite.
    """

    effective_rank: Float[Array, " K"]
    num_tokens: Int[Array, " K"]
    num_windows: Int[Array, ""]


def rank_dynamics(
    hidden_states: Float[AnyArray, "T D"], response_mask: Bool[AnyArray, " T"], **options: Any
) -> RankDynamics:
    """Computes the effective rank of a response, its velocity and its acceleration.

    Args:
      hidden_states, response_mask: as in `effective_rank`.
      stride: tokens between two prefixes, at least 1; ERA needs three strides of tokens.
      window: "exact" (default): prefixes of exactly j * stride tokens of the whole response.
        "release": of the last 512 valid tokens, prefixes of t + 1 tokens for t = stride, 2 stride,
        ... below their number; none if there are fewer than 2 stride. "later": as "release" without
        the limit of 512 tokens, and the whole response as one more prefix.
      method: as in `effective_rank`.

    Returns:
      Float32 scalars; an order is 0.0 below its number of windows (see `PrefixDynamics`).

    Raises:
      ValueError: for a wrong rank, shape, dtype, stride, window or method.

    Source: arXiv:2509.23808. The paper's window rule is not known here: "exact" is the rule of
    this project, "release" the rule of the reference implementation, and "later" the rule of its
    later revisions.
    """
    value, series, windows = _effective_ranks(hidden_states, response_mask, **options)
    return RankDynamics(*summarise(value, series, windows))


def rank_series(
    hidden_states: Float[AnyArray, "T D"], response_mask: Bool[AnyArray, " T"], **options: Any
) -> RankSeries:
    """Computes the effective rank of every prefix that ERV and ERA are computed from.

    Options and errors as in `rank_dynamics`.
    """
    value, series, windows = _effective_ranks(hidden_states, response_mask, **options)
    sizes = jnp.asarray(windows.sizes, jnp.int32)
    series, num_windows = with_whole(windows, value, series)
    sizes, _ = with_whole(windows, windows.rows.num_tokens, sizes)
    valid = jnp.arange(len(sizes)) < num_windows
    return RankSeries(jnp.where(valid, series, 0.0), jnp.where(valid, sizes, 0), num_windows)


def prefix_dynamics(
    metric: Callable[[Float[Array, "T D"], Bool[Array, " T"]], Float[Array, ""]],
    hidden_states: Float[AnyArray, "T D"],
    response_mask: Bool[AnyArray, " T"],
    *,
    stride: int,
    window: str = "exact",
) -> PrefixDynamics:
    """Computes first and second order of any metric of (hidden_states, response_mask).

    Evaluates the metric on every prefix; `rank_dynamics` and `hidden_state_metrics` share work.
    Arguments, errors and windows as in `rank_dynamics`. Zero if a valid row is not finite.
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


def _effective_ranks(
    hidden_states: Float[AnyArray, "T D"],
    response_mask: Bool[AnyArray, " T"],
    *,
    stride: int,
    window: str = "exact",
    method: str = "svd",
) -> tuple[Float[Array, ""], Float[Array, " K"], Windows]:
    """ER of the whole response, ER of its windows, and the windows."""
    check_choice("method", method, METHODS)
    rows = compact(hidden_states, response_mask)
    windows = split_windows(rows, stride, window)
    value, series = spectral_series(rows, windows, (METRIC,), (METRIC,), method=method)
    return value[0], series[:, 0], windows
