"""Metrics of a batch of responses, of one of them, and of the set of their mean states."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.metrics.measurements import Measurement, MetricKey
from semrl_jax.metrics.metric import load_metric
from semrl_jax.metrics.names import (
    METHODS,
    METRICS,
    ORDERS,
    RELEASE_METRICS,
    WINDOWS,
    check_metrics,
    metric_name,
)
from semrl_jax.metrics.prefixes import spectral_series
from semrl_jax.metrics.valid_rows import AnyArray, check_choice, check_states, check_stride, compact
from semrl_jax.metrics.windows import split_windows, summarise, with_whole
from semrl_jax.support.modules import running


def hidden_state_metrics(
    hidden_states: Float[AnyArray, "B T D"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    stride: int,
    window: str = "exact",
    names: Sequence[str] = RELEASE_METRICS,
    method: str = "gram",
    orders: Sequence[str] | None = None,
    side_by_side: bool = False,
    series: Sequence[str] = (),
) -> dict[MetricKey, Measurement]:
    """Measures every response of a batch: value, velocity and acceleration of each metric.

    Args:
      hidden_states, response_mask, method: as in `Metric.__call__`, with a leading axis.
      stride, window: as in `rank_dynamics`.
      names: metrics to compute: of METRICS, or paths of users' modules, see `load_metric`.
      orders: which of `names` get velocity and acceleration too; None: all of them. Windows cost
        more than all values, so name only what is used.
      side_by_side: one batch of decompositions per window, for accelerators, instead of one
        response after the other. A short response then costs as much as a long one.
      series: which of `orders` are returned for every prefix too.

    Returns:
      The float32 [B] values and bool [B] validities by `MetricKey(name)`; for each of `orders` also
      by `MetricKey(name, "velocity")` and `MetricKey(name, "acceleration")`; for each of `series`
      [B, K] by `MetricKey(name, "series")`, the values of the K prefixes. A value is valid from
      `Metric.min_tokens` tokens on, velocity from two windows, acceleration from three. Nothing is
      valid in a response with a non-finite row under the mask. Invalid values are 0.0.

    Raises ValueError for a wrong rank, shape, dtype, stride, window, name, method or order.
    """
    axes = "[B, T, D], one layer of a batch: add an axis to one response"
    check_states(hidden_states, response_mask, axes=axes)
    check_choice("window", window, WINDOWS)
    check_choice("method", method, METHODS)
    names = check_metrics("names", names)
    orders = names if orders is None else check_metrics("orders", orders)
    for name in orders:
        check_choice("orders", name, names)
    for name in series:
        check_choice("series", name, orders)
    return _measure_batch(
        hidden_states,
        response_mask,
        stride=check_stride(stride),
        window=window,
        names=names,
        method=method,
        orders=orders,
        side_by_side=bool(side_by_side),
        series=tuple(series),
    )


class RankDynamics(NamedTuple):
    """Effective rank (ER), its velocity (ERV) and its acceleration (ERA); float32 scalars."""

    effective_rank: Float[Array, ""]
    effective_rank_velocity: Float[Array, ""]
    effective_rank_acceleration: Float[Array, ""]


def rank_dynamics(
    hidden_states: Float[AnyArray, "T D"],
    response_mask: Bool[AnyArray, " T"],
    *,
    stride: int,
    window: str = "exact",
    method: str = "svd",
) -> RankDynamics:
    """Computes the effective rank of a response, its velocity and its acceleration (ER, ERV, ERA).

    Args:
      hidden_states, response_mask, method: as in `Metric.__call__`.
      stride: tokens between two prefixes, at least 1; ERA needs three strides of tokens.
      window: "exact" (default): prefixes of exactly j * stride tokens of the whole response.
        "release": of the last 512 valid tokens, prefixes of t + 1 tokens for t = stride, 2 stride,
        ... below their number; none if there are fewer than 2 stride. "later": as "release" without
        the limit of 512 tokens, and the whole response as one more prefix.

    ERV is 0.0 below two windows and ERA below three. Raises ValueError for a wrong rank, shape,
    dtype, stride, window or method.

    Source: arXiv:2509.23808. The paper's window rule is not known here: "exact" is the rule of
    this project, "release" the rule of the reference implementation, and "later" the rule of its
    later revisions.
    """
    check_states(hidden_states, response_mask)
    measured = hidden_state_metrics(
        hidden_states[None], response_mask[None], stride=stride, window=window,
        names=("effective_rank",), method=method,
    )  # fmt: skip
    return RankDynamics(*(measured[MetricKey("effective_rank", o)].value[0] for o in ORDERS))


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
    names: Sequence[str] = RELEASE_METRICS,
    method: str = "svd",
) -> dict[MetricKey, Measurement]:
    """Measures the mean states of a set of responses as if they were one response.

    For observation only, never for the loss. Options and errors as in `hidden_state_metrics`; the
    stride is the number of responses between two prefixes.

    Args:
      mean_states: rows of `mean_hidden_state`, computed in float32, grouped by prompt in dataset
        order. Velocity and acceleration depend on the order. A row that is not finite does not
        count.

    Returns float32 and bool scalars: the value over all rows, velocity and acceleration over
    growing prefixes of them. `MetricKey.dataset_label` is their log key.
    """
    states = jnp.asarray(mean_states)
    mask = jnp.ones(states.shape[:-1], bool)
    check_states(states, mask, axes="[B, D], a mean state a row", fields=("mean_states", "mask"))
    mask = jnp.all(jnp.isfinite(states), axis=-1)
    measured = hidden_state_metrics(
        states[None], mask[None], stride=stride, window=window, names=names, method=method
    )
    return {key: Measurement(*(x[0] for x in found)) for key, found in measured.items()}


def check_users_metrics(names: Sequence[str], width: int, **options) -> None:
    """Traces each user's metric with these options; UserError if it fails or gives no number."""
    shapes = (2, 32, width), (2, 32)
    response = [jax.ShapeDtypeStruct(*spec) for spec in zip(shapes, (jnp.float32, jnp.bool_))]
    for name in names:
        if name in METRICS:
            continue
        module = importlib.import_module(name)
        with running("metrics.names", module, "METRIC"):
            measure = functools.partial(hidden_state_metrics, names=(name,), **options)
            for key, (value, _) in jax.eval_shape(measure, *response).items():
                if (value.shape, value.dtype) != ((2,), jnp.float32):
                    raise TypeError(
                        f"the {key.order} of a response must be one number, not of shape "
                        f"{value.shape[1:]} and dtype {value.dtype}"
                    )


_STATIC = ("stride", "window", "names", "method", "orders", "side_by_side", "series")


@functools.partial(jax.jit, static_argnames=_STATIC)
def _measure_batch(
    hidden_states: Float[AnyArray, "B T D"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    side_by_side: bool,
    **options,
) -> dict[MetricKey, Measurement]:
    """`hidden_state_metrics` of checked arguments."""
    measure = functools.partial(_measure, batched=side_by_side, **options)
    if side_by_side:
        return jax.vmap(lambda *response: measure(response))(hidden_states, response_mask)
    if hidden_states.shape[0] == 1:  # saves the loop over responses
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
    batched: bool,
    series: tuple[str, ...],
) -> dict[MetricKey, Measurement]:
    """All metrics of one response."""
    rows = compact(*response)
    windows = split_windows(rows, stride, window)
    metrics = {name: load_metric(name) for name in names}
    values: dict[str, Float[Array, ""]] = {}
    of_prefixes: dict[str, Float[Array, " K"]] = {}
    for centred in (True, False):
        found = {name: each for name, each in metrics.items() if each.of_spectrum}
        spectral = [name for name, metric in found.items() if metric.centred is centred]
        if not spectral:
            continue
        spectral_orders = [name for name in spectral if name in orders]
        measured = spectral_series(
            rows,
            windows,
            tuple(metrics[name] for name in spectral),
            tuple(metrics[name] for name in spectral_orders),
            method=method,
            batched=batched,
            centred=centred,
        )
        values |= zip(spectral, measured[0])
        of_prefixes |= zip(spectral_orders, measured[1].T)
    for name in names:
        if of_states := metrics[name].of_states:
            of_first = of_states(rows)
            values[name] = of_first(rows.num_tokens)
            if name in orders:
                of_first = of_first if windows.rows is rows else of_states(windows.rows)
                of_prefixes[name] = jax.vmap(of_first)(jnp.asarray(windows.sizes, jnp.int32))
    result = {}
    for name in names:
        fields = {"value": (values[name], rows.num_tokens >= metrics[name].min_tokens)}
        if name in orders:
            all_values, num_windows = with_whole(windows, values[name], of_prefixes[name])
            found = summarise(all_values, num_windows)
            for order, value in zip(("velocity", "acceleration"), found):
                fields[order] = value, num_windows >= ORDERS[order]
            if name in series:
                fields["series"] = all_values, jnp.arange(len(all_values)) < num_windows
        for order, (value, valid) in fields.items():
            valid = valid & rows.finite
            key = MetricKey(metric_name(name), order)
            result[key] = Measurement(jnp.where(valid, value, 0.0), valid)
    return result
