"""Indicators of each response under the options, and means over responses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from semrl_jax.metrics.measurements import MetricKey, Metrics
from semrl_jax.shaping.options import ShapingOptions


class Indicators(NamedTuple):
    """The K tracked indicators of B responses, in the order of the baselines."""

    values: Float[Array, "K B"]  # float32, 0.0 where not present
    # Which responses have which indicator. With `reproduce_release`, responses too short for
    # velocity or acceleration have it too.
    present: Bool[Array, "K B"]
    valid: Bool[Array, " B"]  # responses that have every used indicator and can be shaped


def read_indicators(metrics: Metrics, options: ShapingOptions) -> Indicators:
    """Reads the tracked indicators; ValueError if one is missing or of another shape."""
    columns = [read_indicator(metrics, name, options.reproduce_release) for name in options.tracked]
    sizes = {name: len(values) for name, (values, _) in zip(options.tracked, columns)}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"metrics hold one value per response, but in numbers that differ: {sizes}."
        )
    values, present = (jnp.stack(parts) for parts in zip(*columns))  # [K, B]
    used = [options.tracked.index(name) for name in options.used]
    return Indicators(values, present, jnp.all(present[np.array(used)], axis=0))


def has_indicators(metrics: Metrics, names: Iterable[str]) -> bool:
    """Whether all these indicators were measured."""
    return all(MetricKey.parse(name) in metrics for name in names)


def read_indicator(
    metrics: Metrics, name: str, with_zeros: bool
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Values without NaN, and which responses have one.

    With `with_zeros`, velocity and acceleration count as 0.0 if they are invalid but the value
    of the metric is valid. Non-finite values and responses with non-finite states never count.
    """
    key = MetricKey.parse(name)
    if key not in metrics:
        held = ", ".join(sorted(key.label for key in metrics)) or "nothing"
        raise ValueError(
            f"metrics has no {name!r}, which the shaping needs; it holds {held}. Compute it, or "
            "change shaping.indicators or shaping.guidance."
        )
    shape = np.shape(metrics[key].value)
    if len(shape) != 1:
        raise ValueError(
            f"metrics[{name!r}] has values of shape {shape}; it must be [B], one per response."
        )
    values = jax.lax.stop_gradient(jnp.asarray(metrics[key].value).astype(jnp.float32))
    finite = jnp.isfinite(values)
    present = finite & _valid(metrics, key, shape)
    values = jnp.where(present, values, 0.0)
    if with_zeros and key.order != "value":
        of_metric = key._replace(order="value")
        present = finite & _valid(metrics, of_metric, shape) if of_metric in metrics else finite
    return values, present


def _valid(metrics: Metrics, key: MetricKey, shape: tuple[int, ...]) -> Bool[Array, " B"]:
    """The validities of a metric."""
    flags = jnp.asarray(metrics[key].valid)
    if flags.shape != shape or flags.dtype != jnp.bool_:
        raise ValueError(
            f"metrics[{key.label!r}] has validities of shape {flags.shape} and dtype "
            f"{flags.dtype}; they must be bool of shape {shape}."
        )
    return flags


def masked_mean(values: Float[Array, "*axes"], mask: Bool[Array, "*axes"]) -> Float[Array, ""]:
    """Mean under the mask; 0.0 if the mask is empty."""
    count = jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)
    # Divides first: the sum could overflow, and a baseline never recovers from infinity.
    return jnp.sum(jnp.where(mask, values / count, 0.0))


def masked_correlation(
    x: Float[Array, " B"], y: Float[Array, " B"], mask: Bool[Array, " B"]
) -> Float[Array, ""]:
    """Pearson correlation under the mask; 0.0 for fewer than two responses or a constant."""
    x, y = _standardised(x, mask), _standardised(y, mask)
    norm = jnp.sqrt(jnp.sum(x * x) * jnp.sum(y * y))
    return jnp.where(norm > 0, jnp.sum(x * y) / jnp.where(norm > 0, norm, 1.0), 0.0)


def _standardised(x: Float[Array, " B"], mask: Bool[Array, " B"]) -> Float[Array, " B"]:
    """Centred, with a largest entry of size 1; zero outside the mask, and zeros for a constant."""
    # The mean of equal values may round; the differences from it would then correlate.
    lowest = jnp.min(jnp.where(mask, x, jnp.inf), initial=jnp.inf)
    highest = jnp.max(jnp.where(mask, x, -jnp.inf), initial=-jnp.inf)
    half = 0.5 * x  # a difference of two float32 may overflow, that of their halves cannot
    centred = jnp.where(mask & (highest > lowest), half - masked_mean(half, mask), 0.0)
    largest = jnp.max(jnp.abs(centred), initial=0.0)
    return centred / jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)
