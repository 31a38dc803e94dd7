"""The weights that are sampled with: all processes give them to the replicas together, or none.

Replicas get the base of an adapter once, and then the adapter of each step, which they apply as the
trainer does. If a replica cannot apply it, all get merged weights: a run has one kind of weights.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import jax
import ml_collections
import numpy as np

from semrl_jax import models
from semrl_jax.cluster.agreement import Retry, run_phase
from semrl_jax.cluster.peers import Peers, Processes
from semrl_jax.cluster.preemption import StopElsewhere, StopRequest
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.sampling.replicas import is_embedded
from semrl_jax.settings.rollout import weight_dtype
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import Preempted
from semrl_jax.types import Adapter, TensorSpec, WeightVersion

T = TypeVar("T")
Read = Callable[[], Iterator[np.ndarray | jax.Array]]


class Weights(NamedTuple):
    """The policy that is sampled from."""

    step: int  # of the loop
    # Starts a pass over the arrays of `WeightSync.specs`. They are on the devices if one process
    # trains and samples.
    read: Read
    read_together: bool  # every process must read, to the end, at the same time
    # Replicas apply it unmerged. None: there is none, or it is merged.
    adapter: Adapter | None = None
    read_adapter: Read | None = None  # over its arrays alone
    # None before the weights are sent, and in a process without replicas.
    version: WeightVersion | None = None


@dataclasses.dataclass
class WeightSync:
    """Reads weights and sends them to the replicas. All processes call its methods together."""

    config: ml_collections.ConfigDict
    architecture: models.DecoderConfig
    client: RolloutClient | None  # None if this process does not sample
    peers: Processes
    stop: StopRequest | StopElsewhere
    reporter: Reporter
    # Whether all replicas of all processes apply adapters unmerged, by rank.
    applied: dict[int, bool] = dataclasses.field(default_factory=dict)
    base: list[np.ndarray | None] = dataclasses.field(default_factory=list)  # of all copies

    def of(self, params: models.Params, step: int) -> Weights:
        """The parameters as weights.

        An embedded replica takes them from device to device. With several processes, all gather
        each tensor together, on the host.
        """
        together = self.peers.count > 1
        on_host = together or not is_embedded(self.config)
        adapter = self._unmerged(params)

        def read() -> Iterator[np.ndarray | jax.Array]:
            of_base = self.read(params, adapter, on_host=on_host)
            return of_base if adapter is None else itertools.chain(of_base, read_adapter())

        def read_adapter() -> Iterator[np.ndarray | jax.Array]:
            return self._read_adapter(params, on_host=on_host)

        return Weights(step, read, together, adapter, None if adapter is None else read_adapter)

    def copied(self, params: models.Params, step: int) -> Weights:
        """A copy in this process's memory, for another thread; empty in one without replicas.

        All copies share the base of an adapter.
        """
        run_phase(self.peers, "sync_weights", self.stop.check)
        keeps, adapter = self.client is not None, self._unmerged(params)

        def copy(arrays: Iterator[np.ndarray]) -> list[np.ndarray | None]:
            with self.stop.deferred():  # a process that leaves in between would block the others
                return [array if keeps else None for array in arrays]

        if adapter is None:
            arrays = copy(self.read(params))
            return Weights(step, lambda: iter(arrays), read_together=False)
        self.base = base = self.base or copy(self.read(params, adapter))
        own = copy(self._read_adapter(params))
        return Weights(step, lambda: itertools.chain(base, own), False, adapter, lambda: iter(own))

    def specs(self, adapter: Adapter | None) -> list[TensorSpec]:
        """The tensors of weights: those of `models.tensor_specs`, and then the adapter's."""
        specs = models.tensor_specs(self.architecture, weight_dtype(self.config))
        return specs + (adapter.specs(specs) if adapter else [])

    def read(
        self, params: models.Params, adapter: Adapter | None = None, *, on_host: bool = True
    ) -> Iterator[np.ndarray | jax.Array]:
        """All tensors but those of an unmerged adapter, in `rollout.weight_dtype`."""
        iterate = models.iterate_base_tensors if adapter else models.iterate_hf_tensors
        tensors = iterate(params, self.architecture, weight_dtype(self.config), on_host=on_host)
        return (array for _, array in tensors)

    def _read_adapter(
        self, params: models.Params, *, on_host: bool = True
    ) -> Iterator[np.ndarray | jax.Array]:
        """The tensors of the adapter, in float32: they are few."""
        tensors = models.iterate_adapter_tensors(params, self.architecture, on_host=on_host)
        return (array for _, array in tensors)

    def _unmerged(self, params: models.Params) -> Adapter | None:
        """The adapter in the parameters, if all replicas apply it; the same in all processes."""
        adapter = models.adapter_of(params, self.architecture)
        if adapter is None:
            return None
        if (rank := adapter.rank) not in self.applied:
            lacking = self.client.without_adapters(rank) if self.client else ""
            if lacking:
                self.reporter.line(
                    f"{lacking}, so all replicas get it merged into the weights: in bfloat16 small "
                    "changes are lost"
                )
            self.applied[rank] = not any(self.peers.gather("sync_weights", lacking))
        return adapter if self.applied[rank] else None

    def send(self, weights: Weights) -> Weights:
        """Sends weights that are not sent yet, or once more; returns them with their version.

        RuntimeError: all attempts together take longer than `rollout.call_timeout_s`.
        """

        def send() -> WeightVersion | None:
            if weights.read_together:
                return self._send_together(weights)
            if self.client is None:
                return None
            with self.stop.interruptible():
                return self.send_here(weights)

        def attempt(check_time: Callable[[], None]) -> WeightVersion | None:
            # Agree first: a process that stops here alone would block the others in a gather.
            run_phase(self.peers, "sync_weights", lambda: (self.stop.check(), check_time()))
            return run_phase(self.peers, "sync_weights", send)

        failure = f"no replica took the weights of step {weights.step}"
        return weights._replace(version=self._repeated(attempt, weights.step, failure))

    def send_here(self, weights: Weights) -> WeightVersion:
        """Sends weights to the replicas of this process alone."""
        step, adapter, read_adapter = weights.step, weights.adapter, weights.read_adapter
        return self.client.sync_weights(
            self.specs(adapter), weights.read, step=step, adapter=adapter, read_adapter=read_adapter
        )

    def _send_together(self, weights: Weights) -> WeightVersion | None:
        """All processes read the base of an adapter if one of them has a replica without it."""
        reads_all = True
        if weights.adapter is not None:

            def lacks_base() -> bool:
                with self.stop.interruptible():
                    return self.client is not None and self.client.lacks_base()

            found = run_phase(self.peers, "sync_weights", lacks_base)
            reads_all = any(self.peers.gather("sync_weights", found))

        def sync(read: Read) -> WeightVersion:
            if reads_all:
                return self.send_here(weights._replace(read=read, read_adapter=None))
            return self.send_here(weights._replace(read=no_base, read_adapter=read))

        def no_base() -> Iterator[np.ndarray]:
            raise Retry("a replica has lost the base of the adapter")

        arrays = weights.read() if reads_all else weights.read_adapter()
        return send_together(self.peers, self.stop, self.client and sync, arrays)

    def sampled(self, weights: Weights, sample_here: Callable[[], None]) -> None:
        """Calls `sample_here`, again after replicas have got weights that they had lost."""
        num_attempts = itertools.count()

        def attempt(check_time: Callable[[], None]) -> None:
            if next(num_attempts):
                self.send(weights)
            run_phase(self.peers, "sample", lambda: (check_time(), sample_here()))

        failure = f"the responses of step {weights.step} did not come"
        self._repeated(attempt, weights.step, failure)

    def _repeated(self, attempt: Callable[[Callable[[], None]], T], step: int, failure: str) -> T:
        """What the first attempt without a Retry returns; each can check if the time is over."""
        timeout_s, reason = self.config.rollout.call_timeout_s, None
        deadline = time.monotonic() + timeout_s

        def check_time() -> None:
            if reason is not None and time.monotonic() > deadline:
                raise RuntimeError(
                    f"{failure} within rollout.call_timeout_s={timeout_s:g} s ({reason})."
                )

        while True:
            try:
                return attempt(check_time)
            except Retry as retry:
                reason = retry
                self.reporter.line(f"the weights of step {step} are sent again: {reason}")


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

    Retry: no replica of this process took the weights. Preempted: after a signal, which also ends a
    wait for a replica at once. Other errors are those of `RolloutClient.sync_weights`.
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
            failed: Future = Future()
            failed.set_exception(error)
            agree(failed.result)
        raise
    finally:
        if reading:
            collections.deque(arrays, maxlen=0)
