"""Copies arrays to and from the host. A process may hold only a part of an array."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from semrl_jax.models.pinned import fetched
from semrl_jax.models.sharding import DATA_AXES


def to_host(tree: Any) -> Any:
    """The tree with NumPy arrays for its jax.Arrays; with several processes, all call it."""

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if leaf.is_fully_addressable or leaf.is_fully_replicated:
            return np.asarray(leaf)
        # From the devices: of an array in the memory of the host, the compiler for TPUs gathers the
        # parts through the network between slices.
        return np.asarray(multihost_utils.process_allgather(fetched(leaf), tiled=True))

    start_copies(tree)
    return jax.tree.map(whole, tree)


def start_copies(tree: Any) -> None:
    """Starts the copies to the host of all leaves that this process holds, and waits for none."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
            leaf.copy_to_host_async()


def from_host(array: np.ndarray | np.generic, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array with this sharding; every process must have the same array and copies its parts."""
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def processes_of(mesh: Mesh) -> Int[np.ndarray, "R F S T X"]:
    """The process of each device of a mesh."""
    return np.vectorize(lambda device: device.process_index)(mesh.devices)


def shard_owners(processes: Int[np.ndarray, "R F S T X"]) -> Int[np.ndarray, " shards"]:
    """The owner of each data shard: the lowest process that holds it."""
    return processes.min(axis=(2, 3)).ravel()


def own_rows(rows: Float[Array, "M R *dims"], mesh: Mesh) -> dict[int, np.ndarray]:
    """[M, R / shards, ...] of each data shard that this process owns; all processes call it."""
    rows = jax.device_put(rows, NamedSharding(mesh, PartitionSpec(None, DATA_AXES)))
    owners = shard_owners(processes_of(mesh))
    num_rows = rows.shape[1] // len(owners)
    own = {}
    for part in rows.addressable_shards:  # several devices may hold the same rows
        shard = (part.index[1].start or 0) // num_rows
        if owners[shard] == jax.process_index() and shard not in own:
            part.data.copy_to_host_async()
            own[shard] = part.data
    return {shard: np.asarray(part) for shard, part in own.items()}
