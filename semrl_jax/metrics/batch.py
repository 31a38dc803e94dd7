"""Metrics of a batch of responses, and of the set of their mean states."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from semrl_jax.choices import METHODS, METRICS, WINDOWS
from semrl_jax.metrics.curvature import mean_angle, turning_angles
from semrl_jax.metrics.entropy import response_entropy_of
from semrl_jax.metrics.inputs import (
    SPECTRAL_METRICS,
    AnyArray,
    check_choice,
    check_growth,
    check_names,
    check_states,
    check_stride,
    compact,
)
from semrl_jax.metrics.prefixes import spectral_series
from semrl_jax.metrics.rank import effective_rank_of, log_effective_rank_of, traditional_rank_of
from semrl_jax.metrics.windows import split_windows, summarise

_OF_SPECTRUM = {
    "effective_rank": effective_rank_of,
    "log_effective_rank": log_effective_rank_of,
    "traditional_rank": traditional_rank_of,
    "response_entropy": response_entropy_of,
}
_MIN_TOKENS = dict.fromkeys(SPECTRAL_METRICS, 2) | {"curvature": 3}


def hidden_state_metrics(
    hidden_states: Float[AnyArray, "B T D"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    stride: int,
    window: str = "exact",
    names: Sequence[str] = METRICS,
    method: str = "gram",
    orders: Sequence[str] | None = None,
    window_growth: float = 1.0,
    side_by_side: bool = False,
) -> dict[str, Shaped[Array, " B"]]:
    """Measures every response of a batch: value, velocity and acceleration of each metric.

    A response gives the same numbers alone and in any batch, up to rounding: responses are taken
    one by one.
    Spectral metrics share one decomposition a window.

    Args:
      hidden_states: any real float dtype, one layer, computed in float32; row t gave response token
        t. Rows outside the mask may hold anything, NaN too.
      response_mask: True on tokens that count; holes are allowed.
      stride: tokens between two prefixes, at least 1.
      window: "exact", "release" or "later", see `rank_dynamics`.
      names: which of METRICS to compute.
      method: "gram": eigenvalues of Gram matrices in float32, and in float64 for a response that
        float32 does not resolve; relative error 1e-3 in ER. "svd": 1e-5, in float64 or by SVD; see
        `effective_rank`.
      orders: which of `names` get velocity and acceleration too; None: all of them. Windows cost
        more than all values, so name what is used.
      window_growth: as in `rank_dynamics`, for spectral metrics; 1 measures every window.
      side_by_side: one batch of decompositions a window instead of one response after the other,
        for accelerators; a response short of the others then costs as much as they do.

    Returns:
      For each name the float32 array `<name>` and the bool `<name>_valid`; for each of `orders`
      also `<name>_velocity`, `<name>_acceleration` and their `..._valid`. What is not valid is 0.0:
      the value below two tokens (curvature: three), velocity below two windows, acceleration below
      three, all of a response with a valid row that is not finite.

    Raises:
      ValueError: for a wrong rank, shape, dtype, stride, window, name, method, order or growth.
    """
    check_states(
        hidden_states, response_mask, axes="[B, T, D], one layer of a batch: add an axis to one "
        "response",
    )  # fmt: skip
    check_choice("window", window, WINDOWS)
    check_choice("method", method, METHODS)
    names = check_names("names", names, METRICS)
    return _measure_batch(
        hidden_states,
        response_mask,
        stride=check_stride(stride),
        window=window,
        names=names,
        method=method,
        orders=names if orders is None else check_names("orders", orders, names),
        growth=check_growth(window_growth),
        side_by_side=bool(side_by_side),
    )


def mean_hidden_state(
    hidden_states: Float[AnyArray, "T D"], response_mask: Bool[AnyArray, " T"]
) -> Float[Array, " D"]:
    """Averages the valid rows in float32; zeros if there is none."""
    check_states(hidden_states, response_mask)
    mask = jnp.asarray(response_mask)[:, None]
    total = jnp.sum(jnp.where(mask, jnp.asarray(hidden_states).astype(jnp.float32), 0.0), axis=0)
    return total / jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)


def dataset_metrics(
    mean_states: Float[AnyArray, "B D"],
    *,
    stride: int,
    window: str = "exact",
    row_mask: Bool[AnyArray, " B"] | None = None,
    names: Sequence[str] = METRICS,
    method: str = "svd",
) -> dict[str, Shaped[Array, ""]]:
    """Measures the mean states of a set of responses as if they were one response.

    For observation only, never for the loss.

    Args:
      mean_states: rows of `mean_hidden_state`, computed in float32, grouped by prompt in dataset
        order, which the cumulative metrics depend on.
      stride: responses between two prefixes, at least 1.
      window: as in `rank_dynamics`.
      row_mask: responses that count, those with at least one token; None counts all. A row that
        is not finite, as that of a broken response is, never counts.
      names, method: as in `hidden_state_metrics`.

    Returns:
      `global/<name>` over all rows, `cumulative/<name>_velocity` and
      `cumulative/<name>_acceleration` over growing prefixes, float32 scalars, each with a bool
      `..._valid` beside it.

    Raises:
      ValueError: as `hidden_state_metrics`.
    """
    states = jnp.asarray(mean_states)
    mask = jnp.ones(states.shape[:-1], bool) if row_mask is None else jnp.asarray(row_mask)
    check_states(
        states, mask, axes="[B, D], a mean state a row", fields=("mean_states", "row_mask")
    )
    mask = mask & jnp.all(jnp.isfinite(states), axis=-1)
    measured = hidden_state_metrics(
        states[None],
        mask[None],
        stride=stride,
        window=window,
        names=names,
        method=method,
    )
    orders = {f"{name}{order}" for name in names for order in ("_velocity", "_acceleration")}
    result = {}
    for key, value in measured.items():
        cumulative = key.removesuffix("_valid") in orders
        result[f"{'cumulative' if cumulative else 'global'}/{key}"] = value[0]
    return result


@functools.partial(
    jax.jit,
    static_argnames=("stride", "window", "names", "method", "orders", "growth", "side_by_side"),
)
def _measure_batch(
    hidden_states: Float[AnyArray, "B T D"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    side_by_side: bool,
    **options,
) -> dict[str, Shaped[Array, " B"]]:
    """`hidden_state_metrics` of checked arguments."""
    measure = functools.partial(_measure, batched=side_by_side, **options)
    if side_by_side:
        return jax.vmap(lambda *response: measure(response))(hidden_states, response_mask)
    if hidden_states.shape[0] == 1:  # the loop over responses is not free
        return jax.tree.map(lambda x: x[None], measure((hidden_states[0], response_mask[0])))
    return jax.lax.map(measure, (jnp.asarray(hidden_states), jnp.asarray(response_mask)))


def _measure(
    response: tuple[Float[Array, "T D"], Bool[Array, " T"]],
    *,
    stride: int,
    window: str,
    names: tuple[str, ...],
    method: str,
    orders: tuple[str, ...],
    growth: float,
    batched: bool,
) -> dict[str, Shaped[Array, ""]]:
    """All asked metrics of one response."""
    rows = compact(*response)
    windows = split_windows(rows, stride, window, growth)
    values: dict[str, Float[Array, ""]] = {}
    series: dict[str, Float[Array, " K"]] = {}
    spectral = [name for name in names if name in _OF_SPECTRUM]
    if spectral:
        spectral_orders = [name for name in spectral if name in orders]
        measured = spectral_series(
            rows,
            windows,
            tuple(_OF_SPECTRUM[name] for name in spectral),
            tuple(_OF_SPECTRUM[name] for name in spectral_orders),
            method=method,
            strict="traditional_rank" in spectral,
            batched=batched,
        )
        values |= zip(spectral, measured[0])
        series |= zip(spectral_orders, measured[1].T)
    if "curvature" in names:
        angles = turning_angles(rows)
        values["curvature"] = mean_angle(*angles, rows.num_tokens)
    if "curvature" in orders:
        angles = angles if windows.rows is rows else turning_angles(windows.rows)
        sizes = jnp.asarray(windows.sizes, jnp.int32)
        series["curvature"] = jax.vmap(lambda size: mean_angle(*angles, size))(sizes)
    result = {}
    for name in names:
        fields = {"": (values[name], rows.num_tokens >= _MIN_TOKENS[name])}
        if name in orders:
            measured = summarise(values[name], series[name], windows)
            fields["_velocity"] = measured.velocity, measured.num_windows >= 2
            fields["_acceleration"] = measured.acceleration, measured.num_windows >= 3
        for order, (value, valid) in fields.items():
            valid = valid & rows.finite
            result[f"{name}{order}"] = jnp.where(valid, value, 0.0)
            result[f"{name}{order}_valid"] = valid
    return result
