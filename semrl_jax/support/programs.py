"""Compiled programs in several threads of a process whose only device is a CPU.

A program on a CPU divides every operation among the cores and then waits for all of them. With
small operations it waits often. As many programs as there are cores, each with a part of the work,
then take less time: 0.7 to 0.9 of it with the models of the benchmarks. Passes and gradients of
training give each program a part of the micro-batches (`parts_of`). Accelerators and several
devices always have one program.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from semrl_jax.support.cores import usable_cores

# Each program has a gradient of its own. Larger models have products that keep all cores busy.
MAX_PART_BYTES = 2**28


class Part(NamedTuple):
    """The micro-batches of one of several programs: `first`, `first + stride`, ...; int32."""

    first: Int[np.ndarray | Array, ""]
    stride: Int[np.ndarray | Array, ""]


def num_side_by_side(mesh: Mesh | None) -> int:
    """How many programs keep the mesh or default device busy: one per core of a CPU, else 1."""
    return usable_cores() if is_one_cpu(mesh) else 1


def is_one_cpu(mesh: Mesh | None) -> bool:
    """Whether the cores of this process are the only device of the mesh."""
    devices = jax.devices()[:1] if mesh is None else mesh.devices.flat
    return len(devices) == 1 and devices[0].platform == "cpu"


def side_by_side(program: Callable[..., Any], calls: Sequence[tuple]) -> list[Any]:
    """The results of `program` for each call, in order; several calls run in threads."""
    if len(calls) == 1:
        return [program(*calls[0])]
    return list(_threads(len(calls)).map(lambda call: jax.block_until_ready(program(*call)), calls))


def parts_of(num_micro: int, params: Any, mesh: Mesh) -> list[Part | None]:
    """The parts of the micro-batches that run side by side; [None]: one program has all."""
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    count = min(num_side_by_side(mesh), num_micro, MAX_PART_BYTES // num_bytes)
    if count < 2:
        return [None]
    return [Part(np.int32(first), np.int32(count)) for first in range(count)]


def total(trees: Sequence[Any]) -> Any:
    """The sum of what the parts gave."""
    return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), trees)


@functools.cache
def _threads(count: int) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(count, "side-by-side")


class compiled_once:
    """A jitted function for several threads: they wait for one compilation, JAX makes several."""

    def __init__(self, jitted: Callable[..., Any]):
        functools.update_wrapper(self, jitted)
        self._jitted = jitted
        # A lock per program, by what JAX compiles for; None once the program is compiled.
        self._locks: dict[Any, threading.Lock | None] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, options))
        key = structure, *map(_kind, leaves)
        lock = self._locks.setdefault(key, threading.Lock())
        if lock is None:
            return self._jitted(*args, **options)
        with lock:
            result = self._jitted(*args, **options)
            self._locks[key] = None
        return result

    def clear_cache(self) -> None:
        self._jitted.clear_cache()
        self._locks.clear()

    def __getattr__(self, name: str) -> Any:
        """The other methods of a jitted function, such as `lower`."""
        return getattr(self._jitted, name)


def _kind(leaf: Any) -> Any:
    """What a program depends on: shape and dtype of an array, the value of a static argument."""
    is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
    return (leaf.shape, leaf.dtype) if is_array else leaf
