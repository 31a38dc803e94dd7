"""The cores of a CPU that is the only device, and programs side by side on them.

A program on a CPU divides every operation among the cores and then waits for all of them. With
small operations it waits often. As many programs as there are cores, each with a part of the work,
then take less time: 0.7 to 0.9 of it with the models of the benchmarks.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh


def usable_cores(mesh: Mesh | None) -> int:
    """The cores that this process may use, if a CPU is the only device of the mesh; otherwise 1.

    Without a mesh, of the default device.
    """
    devices = jax.devices()[:1] if mesh is None else mesh.devices.flat
    if len(devices) > 1 or devices[0].platform != "cpu":
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def side_by_side(program: Callable[..., Any], calls: Sequence[tuple]) -> list[Any]:
    """The results of a jitted program for equal shapes, ready, in the order of the calls.

    Args:
      program: hashable, for example a `functools.partial` of the options that is kept.
      calls: positional arguments.
    """
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), calls[0])
    if len(calls) == 1 or _is_new(program, (jax.tree.structure(shapes), *jax.tree.leaves(shapes))):
        # The first call compiles. Threads that begin together would all compile.
        return [jax.block_until_ready(program(*call)) for call in calls]
    return list(_threads(len(calls)).map(lambda call: jax.block_until_ready(program(*call)), calls))


@functools.cache
def _threads(count: int) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix="core")


_compiled: set[Hashable] = set()


def _is_new(program: Hashable, shapes: Hashable) -> bool:
    known = (program, shapes) in _compiled
    _compiled.add((program, shapes))
    return not known
