"""The cores that this process may use, and how it shares them with its child processes."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

from semrl_jax.support.errors import UserError


def usable_cores() -> int:
    """Cores that the process is bound to, if the system can tell; else all of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_helper_cores: tuple[int, ...] = ()


def leave_cores(num_children: int, per_child: int, *, in_turn: bool) -> None:
    """Binds this process to the cores that its children do not get, before JAX starts its threads.

    `in_turn`: this process rests while they work, see `helper_cores`. UserError without a core.
    """
    global _helper_cores
    if num_children * per_child:
        of_children = _last_cores(num_children * per_child)
        _helper_cores = _first_cores() if in_turn else of_children
        bind([core for core in _first_cores() if core not in of_children])


def cores_of_child(number: int, per_child: int) -> tuple[int, ...]:
    """The cores of a child process, from 0; () for all."""
    end = number * per_child
    return _last_cores(end + per_child)[:per_child] if per_child else ()


def helper_cores() -> tuple[int, ...]:
    """The cores for short work of other processes, such as verifiers; () for all.

    They are the children's if this process works all the time, on few cores.
    """
    return _helper_cores


def bind(cores: Sequence[int]) -> None:
    """Binds this process, and the threads that it starts from now on; UserError if it cannot."""
    try:
        os.sched_setaffinity(0, cores)
    except (AttributeError, OSError):
        raise UserError(
            f"this process cannot be bound to the cores {list(cores)} of {list(_first_cores())}; "
            "set rollout.jax_process_cores=0, which leaves the cores to the system."
        ) from None


def _last_cores(count: int) -> tuple[int, ...]:
    cores = _first_cores()
    if count >= len(cores):
        raise UserError(
            f"rollout.jax_processes * rollout.jax_process_cores = {count} leaves the trainer none "
            f"of its {len(cores)} cores; lower one of them, or set jax_process_cores=0."
        )
    return cores[len(cores) - count :]


@functools.cache
def _first_cores() -> tuple[int, ...]:
    """The cores of this process when it first asked, before it left some of them."""
    if not hasattr(os, "sched_getaffinity"):
        raise UserError("rollout.jax_process_cores needs Linux; set it to 0.")
    return tuple(sorted(os.sched_getaffinity(0)))
