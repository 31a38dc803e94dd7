"""Arrays of which each process may hold a part, to and from the host."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def to_host(tree: Any) -> Any:
    """The tree with NumPy arrays for its jax.Arrays.

    Where other processes hold parts, all have to call it, with the same tree at the same time.
    """

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if leaf.is_fully_addressable or leaf.is_fully_replicated:
            return np.asarray(leaf)
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))

    # The copies of all leaves start before the first is waited for.
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
            leaf.copy_to_host_async()
    return jax.tree.map(whole, tree)


def from_host(array: np.ndarray | np.generic, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array laid out so; every process has to have the same one and copies its parts."""
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
