"""Sends the weights of several processes to their replicas: all gather a tensor, or none does."""

from __future__ import annotations

import collections
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
    """One process's part of a sync of weights; all have to call it.

    The first tensor is read when every owner has a replica that answers. Until then all wait, and
    the missing process is named. From then on all read to the end, even if their replicas fail.

    Args:
      sync: of an owner, `RolloutClient.sync_weights`, given what starts a pass over the arrays; the
        others read along.
      arrays: each is gathered by all processes when the next one is asked for.

    Raises:
      Retry: no replica of this process took the weights.
      Preempted: a signal came; a wait for a replica ends at once.
      Exception: as `RolloutClient.sync_weights`.
    """
    arrays = iter(arrays)
    agreed = reading = False

    def agree(work: Callable[[], Any]) -> None:
        nonlocal agreed, reading
        with stop.deferred():  # leaving in the middle would block the others
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
            agree(_raising(error))
        raise
    finally:
        if reading:
            collections.deque(arrays, maxlen=0)


def _raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work
