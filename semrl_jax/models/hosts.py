"""Arrays that no process holds whole, on the host of each."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def to_host(tree: Any) -> Any:
    """The tree with NumPy arrays for its jax.Arrays.

    Where other processes hold parts, all have to call it, with the same tree in the same order:
    each leaf is then gathered on every device first, one at a time.
    """
    return jax.tree.map(_to_host, tree)


def layer_to_host(tree: Any, layer: int) -> Any:
    """As `to_host` of `leaf[layer]` for every leaf."""
    leaves, structure = jax.tree.flatten(tree)
    if all(leaf.is_fully_addressable for leaf in leaves if isinstance(leaf, jax.Array)):
        return jax.device_get(jax.tree.map(lambda leaf: leaf[layer], tree))
    gathered = _take(_everywhere(leaves[0].sharding.mesh))(leaves, layer)
    return structure.unflatten([np.asarray(leaf.addressable_data(0)) for leaf in gathered])


def from_host(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array laid out so; every process has to have the same one."""
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _to_host(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    gathered = _identity(_everywhere(leaf.sharding.mesh))(leaf)
    return np.asarray(gathered.addressable_data(0))


def _everywhere(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


@functools.cache
def _identity(sharding: NamedSharding):
    return jax.jit(lambda leaf: leaf, out_shardings=sharding)


@functools.cache
def _take(sharding: NamedSharding):
    # The layer is an argument: one program for all of them.
    return jax.jit(lambda leaves, layer: [leaf[layer] for leaf in leaves], out_shardings=sharding)
