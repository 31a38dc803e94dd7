"""The weights that are sampled with: all processes give them to the replicas together, or none."""

from __future__ import annotations

import collections
import dataclasses
import functools
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
from semrl_jax.types import WeightVersion

T = TypeVar("T")


class Weights(NamedTuple):
    """The policy that is sampled from."""

    step: int  # of the loop
    # Starts a pass over the arrays of `models.tensor_specs`. They are on the devices if one process
    # trains and samples.
    read: Callable[[], Iterator[np.ndarray | jax.Array]]
    read_together: bool  # every process must read, to the end, at the same time
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

    def of(self, params: models.Params, step: int) -> Weights:
        """The parameters as weights.

        An embedded replica takes them from device to device. With several processes, all gather
        each tensor together, on the host.
        """
        together = self.peers.count > 1
        on_host = together or not is_embedded(self.config)
        read = functools.partial(self.read, params, on_host=on_host)
        return Weights(step, read, read_together=together)

    def copied(self, params: models.Params, step: int) -> Weights:
        """A copy in this process's memory, for another thread; empty in one without replicas."""
        run_phase(self.peers, "sync_weights", self.stop.check)
        keeps = self.client is not None
        with self.stop.deferred():  # a process that leaves in between would block the others
            arrays = [array if keeps else None for array in self.read(params)]
        return Weights(step, lambda: iter(arrays), read_together=False)

    def read(
        self, params: models.Params, *, on_host: bool = True
    ) -> Iterator[np.ndarray | jax.Array]:
        """The arrays of `models.tensor_specs`, in `rollout.weight_dtype`."""
        dtype = weight_dtype(self.config)
        tensors = models.iterate_hf_tensors(params, self.architecture, dtype, on_host=on_host)
        return (array for _, array in tensors)

    def send(self, weights: Weights) -> Weights:
        """Sends weights that are not sent yet, or once more; returns them with their version.

        RuntimeError: all attempts together take longer than `rollout.call_timeout_s`.
        """

        def send() -> WeightVersion | None:
            if weights.read_together:
                sync = functools.partial(self.send_here, weights.step)
                return send_together(self.peers, self.stop, self.client and sync, weights.read())
            if self.client is None:
                return None
            with self.stop.interruptible():
                return self.send_here(weights.step, weights.read)

        def attempt(check_time: Callable[[], None]) -> WeightVersion | None:
            # Agree first: a process that stops here alone would block the others in a gather.
            run_phase(self.peers, "sync_weights", lambda: (self.stop.check(), check_time()))
            return run_phase(self.peers, "sync_weights", send)

        failure = f"no replica took the weights of step {weights.step}"
        return weights._replace(version=self._repeated(attempt, weights.step, failure))

    def send_here(self, step: int, read: Callable[[], Iterator[np.ndarray]]) -> WeightVersion:
        """Sends weights to the replicas of this process alone."""
        specs = models.tensor_specs(self.architecture, weight_dtype(self.config))
        return self.client.sync_weights(specs, read, step=step)

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
