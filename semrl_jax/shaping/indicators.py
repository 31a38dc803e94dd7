"""What the metrics say of each response under the options, and means over those responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

from semrl_jax.shaping.options import ShapingOptions

Metrics = Mapping[str, Shaped[Array | np.ndarray, " B"]]


class Indicators(NamedTuple):
    """The K tracked indicators of B responses, in the order of the baselines.

    Attributes:
      values: float32, 0.0 where not present.
      present: which responses have which indicator; under invalid="zeros" also those too short
        for an order.
      valid: responses that have every used indicator, so that they can be shaped.
    """

    values: Float[Array, "K B"]
    present: Bool[Array, "K B"]
    valid: Bool[Array, " B"]


def read_indicators(metrics: Metrics, options: ShapingOptions) -> Indicators:
    """Takes the tracked indicators out of the metrics; ValueError where they do not fit."""
    columns = [read_indicator(metrics, name, options.invalid) for name in options.tracked]
    sizes = {name: len(values) for name, (values, _) in zip(options.tracked, columns)}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"metrics hold one value per response, but in numbers that differ: {sizes}."
        )
    values, present = (jnp.stack(parts) for parts in zip(*columns))  # [K, B]
    used = [options.tracked.index(name) for name in options.used]
    return Indicators(values, present, jnp.all(present[np.array(used)], axis=0))


def read_indicator(
    metrics: Metrics, name: str, invalid: str
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Values without NaN, and which responses have one.

    A missing `<name>_valid` means valid wherever finite. With invalid='zeros' an order counts as
    0.0 where it is not valid but its metric is; what is not finite, as a value or as the hidden
    states behind it, never counts.
    """
    if name not in metrics:
        raise ValueError(
            f"metrics has no {name!r}, which the shaping needs; it holds "
            f"{', '.join(sorted(metrics)) or 'nothing'}. Compute it, or change shaping.indicators "
            "or shaping.guidance."
        )
    shape = np.shape(metrics[name])
    if len(shape) != 1:
        raise ValueError(
            f"metrics[{name!r}] has shape {shape}; it must be [B], one value per response."
        )
    values = jax.lax.stop_gradient(jnp.asarray(metrics[name]).astype(jnp.float32))
    finite = jnp.isfinite(values)
    present = finite & _valid(metrics, name, shape)
    values = jnp.where(present, values, 0.0)
    metric = name.removesuffix("_velocity").removesuffix("_acceleration")
    if invalid == "zeros" and metric != name:
        present = finite & _valid(metrics, metric, shape)
    return values, present


def _valid(metrics: Metrics, name: str, shape: tuple[int, ...]) -> Bool[Array, " B"]:
    """`<name>_valid`, True where there is none."""
    if (key := f"{name}_valid") not in metrics:
        return jnp.ones(shape, bool)
    flags = jnp.asarray(metrics[key])
    if flags.shape != shape or flags.dtype != jnp.bool_:
        raise ValueError(
            f"metrics[{key!r}] has shape {flags.shape} and dtype {flags.dtype}; it must be "
            f"{shape} and bool, as the metrics have one value per response."
        )
    return flags


def masked_mean(values: Float[Array, "*axes"], mask: Bool[Array, "*axes"]) -> Float[Array, ""]:
    """Mean under the mask, 0.0 of nothing."""
    count = jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)
    # Divided first: a sum of large values would leave float32, and no baseline recovers from inf.
    return jnp.sum(jnp.where(mask, values / count, 0.0))


def masked_correlation(
    x: Float[Array, " B"], y: Float[Array, " B"], mask: Bool[Array, " B"]
) -> Float[Array, ""]:
    """Pearson correlation under the mask; 0.0 of fewer than two responses or a constant."""
    x, y = _standardised(x, mask), _standardised(y, mask)
    norm = jnp.sqrt(jnp.sum(x * x) * jnp.sum(y * y))
    return jnp.where(norm > 0, jnp.sum(x * y) / jnp.where(norm > 0, norm, 1.0), 0.0)


def _standardised(x: Float[Array, " B"], mask: Bool[Array, " B"]) -> Float[Array, " B"]:
    """Centred, largest entry of size 1; zeros off the mask, and all of a constant."""
    # The rounded mean of equal values need not be that value: what is left would correlate.
    lowest = jnp.min(jnp.where(mask, x, jnp.inf), initial=jnp.inf)
    highest = jnp.max(jnp.where(mask, x, -jnp.inf), initial=-jnp.inf)
    half = 0.5 * x  # the difference of two float32 may leave its range, of their halves not
    centred = jnp.where(mask & (highest > lowest), half - masked_mean(half, mask), 0.0)
    largest = jnp.max(jnp.abs(centred), initial=0.0)
    return centred / jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)
