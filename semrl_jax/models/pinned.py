"""Arrays in the memory of the host, which keep the layout that they have on devices."""

from __future__ import annotations

from typing import Any

import jax

PINNED = "pinned_host"  # the only memory of a host that programs of GPUs and TPUs take


def fetched(tree: Any) -> Any:
    """Arrays on their devices: those in `PINNED` are copied, each once; others stay as they are.

    Under `jax.jit` nothing is copied.
    """
    copies: dict[int, jax.Array] = {}  # by the identity of what is copied

    def of(leaf: Any) -> Any:
        is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        if not is_array or leaf.sharding.memory_kind != PINNED:
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
        return copies[id(leaf)]

    return jax.tree.map(of, tree)
