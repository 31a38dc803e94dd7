"""Arrays in the memory of the host, for devices that can read and write it themselves."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from semrl_jax.support.errors import UserError

KIND = "pinned_host"  # the only memory of a host that programs of GPUs and TPUs take


def check_offload(parts: tuple[str, ...], device: Any) -> None:
    """Raises UserError if a `jax.Device` cannot keep something in the memory of its host."""
    kinds = [memory.kind for memory in device.addressable_memories()]
    if parts and KIND not in kinds:
        raise UserError(
            f"training.offload={parts}: devices of kind {device.device_kind!r} with the memories "
            f"{', '.join(kinds)} have no {KIND!r}; set training.offload=()."
        )


def on_host(shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """Where an offloaded array of this shape lies. Scalars stay on the device."""
    return sharding.with_memory_kind(KIND) if shape else sharding


def fetched(tree: Any) -> Any:
    """Arrays on their devices: those on the host are copied, others stay what they are."""

    def of(leaf):
        if leaf.sharding.memory_kind != KIND:
            return leaf
        return jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))

    return jax.tree.map(of, tree)


def to_device(tree: Any) -> Any:
    """Offloaded arrays on their devices, split as before; under `jax.jit`."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device), tree)


def to_host(tree: Any) -> Any:
    """The inverse of `to_device`, which leaves scalars on the device."""
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, jax.memory.Space.Host) if leaf.ndim else leaf, tree
    )
