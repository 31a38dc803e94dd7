"""Checksums of arrays on devices, which two runs compare."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from semrl_jax.models.policy import Params


@jax.jit
def array_sums(tree: Params) -> Any:
    """A pair of every array: a checksum of its bits, uint32, and its norm, float32.

    The checksum is the sum of bits_i * (2 i + 1) modulo 2^32 over all entries i. A change of one
    entry always changes it, because the factor is odd. It is independent of the order of the sum,
    and therefore of the mesh.
    """
    return jax.tree.map(lambda leaf: (_checksum(leaf), _norm(leaf)), tree)


def _checksum(leaf: Array) -> Array:
    kind = f"uint{8 * leaf.dtype.itemsize}"
    bits = jax.lax.bitcast_convert_type(leaf, kind).astype(jnp.uint32)
    factor = jnp.ones((), jnp.uint32)
    stride = 2
    for axis in reversed(range(leaf.ndim)):
        places = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        factor = factor + places * np.uint32(stride % 2**32)
        stride *= leaf.shape[axis]
    return jnp.sum(bits * factor, dtype=jnp.uint32)


def _norm(leaf: Array) -> Array:
    return jnp.sqrt(jnp.sum(jnp.square(leaf.astype(jnp.float32))))
