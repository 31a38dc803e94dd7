"""Arrays in the memory of the host, for devices that can read and write it themselves."""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import ml_collections
from jax.sharding import NamedSharding

from semrl_jax.models.pinned import PINNED as KIND
from semrl_jax.sampling.replicas import is_embedded
from semrl_jax.support.errors import UserError


def is_away(config: ml_collections.ConfigDict, part: str) -> bool:
    """Whether a part of `support.choices.OFFLOADED` is on the host while responses are sampled."""
    return config.rollout.in_turns or part in config.training.offload


def check_offload(parts: tuple[str, ...], device: Any, field: str = "training.offload") -> None:
    """Raises UserError if a `jax.Device` cannot keep something in the memory of its host."""
    kinds = [memory.kind for memory in device.addressable_memories()]
    if parts and KIND not in kinds:
        raise UserError(
            f"{field}={parts}: devices of kind {device.device_kind!r} with the memories "
            f"{', '.join(kinds)} have no {KIND!r}; leave {field} at its default."
        )


def check_gives_back(config: ml_collections.ConfigDict, device: Any) -> None:
    """Raises UserError if JAX keeps the freed memory of a GPU, which other processes need."""
    name, wanted = "XLA_PYTHON_CLIENT_ALLOCATOR", "platform"
    is_gpu, found = device.platform in ("gpu", "cuda", "rocm"), os.environ.get(name, "default")
    if config.rollout.in_turns and is_gpu and not is_embedded(config) and found != wanted:
        raise UserError(
            f"rollout.in_turns=True: JAX with {name}={found} keeps the memory that the replica "
            f"needs in its turn; start the trainer with {name}={wanted}."
        )


def on_host(shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """Where an offloaded array of this shape lies. Scalars stay on the device."""
    return sharding.with_memory_kind(KIND) if shape else sharding


def host_copies(tree: Any) -> Any:
    """The inverse of `models.pinned.fetched` for arrays of one dimension and more, outside jit."""

    def of(leaf: Any) -> Any:
        if not leaf.ndim or leaf.sharding.memory_kind == KIND:
            return leaf
        return jax.device_put(leaf, on_host(leaf.shape, leaf.sharding))

    return jax.tree.map(of, tree)


def drop(old: Any, new: Any) -> int:
    """Deletes the arrays of `old` that `new` has elsewhere; returns their bytes in this process."""
    jax.block_until_ready(new)
    num_bytes = 0
    for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        if before is not after and not before.is_deleted():
            num_bytes += local_bytes(before)
            before.delete()  # also where others still refer to it
    return num_bytes


def local_bytes(array: jax.Array) -> int:
    """Bytes of an array on the devices of this process."""
    sharding = array.sharding
    one = math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return one * len(sharding.addressable_devices)


def to_device(tree: Any) -> Any:
    """Offloaded arrays on their devices, split as before; under `jax.jit`."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device), tree)


def to_host(tree: Any) -> Any:
    """The inverse of `to_device`, which leaves scalars on the device."""
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, jax.memory.Space.Host) if leaf.ndim else leaf, tree
    )
