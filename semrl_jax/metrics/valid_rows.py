"""Input of every metric: checks, and the valid rows of a response, compact and scaled."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

AnyArray = jax.Array | np.ndarray


class Rows(NamedTuple):
    """The valid rows of one response, in order, zero rows after them."""

    # Float32 [T, D], divided by `scale`; all zero if a valid row was not finite.
    states: Float[Array, "T D"]
    num_tokens: Int[Array, ""]  # int32, how many rows are valid
    # Float32 power of two near the largest entry, so that squares do not overflow. The division is
    # exact. Entries below 1.2e-38, before or after it, count as zero.
    scale: Float[Array, ""]
    finite: Bool[Array, ""]  # whether every valid row was finite


def check_states(
    states: Any,
    mask: Any,
    *,
    axes: str = "[T, D], one layer of one response: use jax.vmap",
    fields: tuple[str, str] = ("hidden_states", "response_mask"),
) -> None:
    """Raises ValueError for a wrong rank, dtype or shape; runs while tracing only."""
    shape, dtype = _shape_and_dtype(fields[0], states)
    if len(shape) != axes[: axes.index("]")].count(",") + 1:
        raise ValueError(f"{fields[0]} has shape {shape}; it must be {axes}.")
    if shape[-1] == 0:
        raise ValueError(f"{fields[0]} has shape {shape}; its width D must be at least 1.")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{fields[0]} has dtype {dtype}; it must be real floating point.")
    mask_shape, mask_dtype = _shape_and_dtype(fields[1], mask)
    if mask_shape != shape[:-1]:
        raise ValueError(
            f"{fields[1]} has shape {mask_shape}; it must be {shape[:-1]}, the leading axes of "
            f"{fields[0]} {shape}."
        )
    if mask_dtype != jnp.bool_:
        raise ValueError(
            f"{fields[1]} has dtype {mask_dtype}; it must be bool, True on rows that count "
            f"(integer masks: {fields[1]} != 0)."
        )


def _shape_and_dtype(field: str, value: Any) -> tuple[tuple[int, ...], np.dtype]:
    if not isinstance(value, AnyArray):
        raise ValueError(
            f"{field} is of type {type(value).__name__}; it must be a NumPy or JAX array."
        )
    return np.shape(value), jnp.result_type(value)


def check_choice(field: str, value: Any, choices: Sequence[str]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{field}={value!r} is unknown; it must be one of {', '.join(choices)}.")


def check_stride(stride: Any) -> int:
    """Returns the stride as an int; ValueError unless it is a whole number from 1 on."""
    try:
        value = 0 if isinstance(stride, bool) else operator.index(stride)
    except TypeError:
        value = 0
    if value < 1:
        raise ValueError(f"stride={stride!r} must be an integer of at least 1 token.")
    return value


def compact(hidden_states: Float[AnyArray, "T D"], response_mask: Bool[AnyArray, " T"]) -> Rows:
    """Moves the rows under the mask to the front, in order; other rows may hold anything."""
    check_states(hidden_states, response_mask)
    mask = jnp.asarray(response_mask)
    num_tokens = jnp.sum(mask, dtype=jnp.int32)
    # Metrics have no gradient: that of a square root is NaN on a straight line, for example.
    hidden_states = jax.lax.stop_gradient(jnp.asarray(hidden_states).astype(jnp.float32))
    sizes = jnp.where(mask[:, None], jnp.abs(hidden_states), 0.0)
    largest = jnp.max(sizes, initial=0.0)  # NaN if one is
    finite = jnp.isfinite(largest)
    # The largest power of two not above it, by its exponent bits; 1.0 for zero and subnormals.
    bits = jax.lax.bitcast_convert_type(jnp.where(finite, largest, 0.0), jnp.int32) & 0x7F800000
    scale = jnp.where(bits > 0, jax.lax.bitcast_convert_type(bits, jnp.float32), 1.0)
    order = jnp.argsort(~mask, stable=True)
    valid = (jnp.arange(mask.shape[0]) < num_tokens)[:, None]
    # LAPACK may hang on NaN: no NaN passes this line.
    states = jnp.where(valid & finite, hidden_states[order] / scale, 0.0)
    return Rows(states, num_tokens, scale, finite)


def anchor(
    rows: Rows, num_rows: Int[Array, ""] | int, start: Int[Array, ""] | int = 0
) -> Float[Array, "T D"]:
    """Subtracts the mean of `num_rows` valid rows, so that later centring loses no digits.

    Row `start` is subtracted before the mean: equal rows become exactly zero, and a huge common
    offset disappears. The mean is over rows from `start` on. A prefix from there with at least
    num_rows rows contains all of them, so its remaining offset is bounded by its own scatter. T is
    at least 1.
    """
    states, num_tokens = rows.states, rows.num_tokens
    position = jnp.arange(states.shape[0])[:, None]
    first = jax.lax.dynamic_slice_in_dim(states, start, 1)  # [1, D]
    shifted = jnp.where(position < num_tokens, states - first, 0.0)
    count = jnp.minimum(jnp.asarray(num_rows), num_tokens - start)
    chosen = (position >= start) & (position < start + count)
    total = jnp.sum(jnp.where(chosen, shifted, 0.0), axis=0, keepdims=True)
    mean = total / jnp.maximum(count, 1).astype(states.dtype)  # [1, D]
    return jnp.where(position < num_tokens, shifted - mean, 0.0)
