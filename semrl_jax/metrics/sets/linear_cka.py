"""Linear centred kernel alignment of two sets of states of the same tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.metrics.spectrum import symmetric_product, with_float64
from semrl_jax.metrics.valid_rows import AnyArray, Rows, anchor, check_states, compact


@jax.jit
def linear_cka(
    first: Float[AnyArray, "T D"], second: Float[AnyArray, "T E"], mask: Bool[AnyArray, " T"]
) -> Float[Array, ""]:
    """Computes |X^T Y|_F^2 / (|X^T X|_F |Y^T Y|_F) of the centred valid rows X and Y, in float64.

    It is 1 if one set has the rows of the other one, rotated, scaled and moved.

    Args:
      first, second: states of the same tokens, such as of a policy and its reference, or of two
        layers; any real float dtype. Rows outside the mask may hold anything.
      mask: True on tokens that count.

    Returns float32 in [0, 1]; 0.0 if all rows of a set are equal or a valid row is not finite.

    Source: arXiv:1905.00414.
    """
    check_states(first, mask, fields=("first", "mask"))
    check_states(second, mask, fields=("second", "mask"))
    rows = compact(first, mask), compact(second, mask)
    return with_float64(_alignment)(*rows)


def _alignment(first: Rows, second: Rows) -> Float[Array, ""]:
    both = []
    for rows in (first, second):
        states = rows.states.astype(jnp.float64)
        if states.shape[0]:
            states = anchor(rows._replace(states=states), states.shape[0])
        both.append(states)
    x, y = both
    product = functools.partial(jnp.sum, dtype=jnp.float64)
    if x.shape[0] > max(x.shape[1], y.shape[1]):  # of long responses, a T x T matrix has gigabytes
        grams = [symmetric_product(states.T) for states in both]
        common = product(jnp.matmul(x.T, y, precision=jax.lax.Precision.HIGHEST) ** 2)
    else:
        grams = [symmetric_product(states) for states in both]
        common = product(grams[0] * grams[1])
    size = jnp.sqrt(product(grams[0] ** 2) * product(grams[1] ** 2))
    value = common / jnp.where(size > 0, size, 1.0)
    return jnp.where(first.finite & second.finite, value, 0.0).astype(jnp.float32)
