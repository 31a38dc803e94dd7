"""Weight sync with several processes: they gather each tensor together, or none begins."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from semrl_jax.cluster.agreement import Retry, run_phase
from semrl_jax.cluster.peers import Peers
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.errors import Preempted
from semrl_jax.types import WeightVersion


def send_together(
    peers: Peers,
    stop: StopRequest,
    sync: Callable[[Callable[[], Iterator[np.ndarray]]], WeightVersion] | None,
    arrays: Iterable[np.ndarray],
) -> WeightVersion | None:
    """One process's part of a weight sync; every process must call it.

    All processes wait until each sampling process has a replica that answers. A process that keeps
    the others waiting is named. Then all read the tensors to the end, even if replicas fail.

    Args:
      sync: calls `RolloutClient.sync_weights` with a function that starts a pass over the arrays;
        None in a process that does not sample, which only takes part in the gathering.
      arrays: advancing this iterator gathers the next tensor over all processes.

    Raises:
      Retry: if no replica of this process took the weights.
      Preempted: after a signal, which also ends a wait for a replica at once.
      Exception: as `RolloutClient.sync_weights`.
    """
    arrays = iter(arrays)
    agreed = reading = False

    def agree(work: Callable[[], Any]) -> None:
        nonlocal agreed, reading
        with stop.deferred():  # a process that leaves in between would block the others
            agreed = True
            run_phase(peers, "await_replicas", work)
            reading = True

    def read_one_by_one() -> Iterator[np.ndarray]:
        while True:
            with stop.deferred():
                array = next(arrays, None)
            if array is None:
                return
            yield array

    def read() -> Iterator[np.ndarray]:
        if agreed:
            raise Retry("no replica took the weights")
        agree(stop.check)
        return read_one_by_one()

    try:
        if sync is None:
            agree(stop.check)
            return None
        with stop.interruptible():
            return sync(read)
    except (Exception, Preempted) as error:
        if not agreed:
            agree(functools.partial(_raise, error))
        raise
    finally:
        if reading:
            collections.deque(arrays, maxlen=0)


def _raise(error: BaseException) -> None:
    raise error
