"""Sampling during the updates: the batch of step s has the weights of step max(0, s - lag)."""

from __future__ import annotations

import collections
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from semrl_jax import models
from semrl_jax.cluster.agreement import is_agreed, run_phase
from semrl_jax.data.prompts import Position
from semrl_jax.sampling.sampler import Sampler
from semrl_jax.sampling.scoring import Scored
from semrl_jax.sampling.source import Batches, Sample
from semrl_jax.sampling.weights import Weights
from semrl_jax.support.clock import Clock
from semrl_jax.support.errors import Preempted
from semrl_jax.types import SampleRequest

POLL_S = 0.002  # of the main thread: a signal in the wait for a lock could leave it unheld
CLOSE_S = 10.0  # for the sampling thread to end


class _Job(NamedTuple):
    """What is sampled with the weights of one step; it begins the batch of step `begins`."""

    begins: int
    weights: Weights
    done: Future[_Done]


class _Done(NamedTuple):
    """A job that was done."""

    sample: Sample | None  # the batch that it completed, if any
    events: dict[str, float]  # counted while this batch was sampled
    ended: float  # in time.monotonic()
    seconds: dict[str, float]  # by log key


@dataclasses.dataclass
class Ahead:
    """A source that samples the batches of later steps in another thread while one is trained on.

    The batch of step s begins with the weights of step max(0, s - lag), one batch after the other.
    So what `next` returns follows from the config and the step, independent of time. An evaluation
    waits until nothing else is being sampled.
    """

    lag: int  # above 0
    # Number of steps between the newest weights that sample tokens of a batch and the step that
    # trains on it: `lag`, or 1 if a batch is sampled in parts.
    ready: int
    num_steps: int  # of the run
    sampler: Sampler  # used by the main thread, for evaluations
    # Used by the sampling thread, with its own channel to the other processes.
    thread_sampler: Sampler
    batches: Batches  # the batches that `thread_sampler` samples
    # Returns the counts of events since its last call; it uses the same channel.
    count: Callable[[], dict[str, float]]

    def __post_init__(self):
        self._offered: dict[int, Weights] = {}  # by step, those that are still needed
        self._newest: Weights | None = None
        self._begun: dict[int, Future[_Done]] = {}  # by step of the weights; not taken yet
        self._position: Position | None = None  # after the last batch
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._events: collections.Counter[str] = collections.Counter()  # of evaluations
        self._evaluated_s = 0.0  # since the last batch, while the sampling thread has no batch
        self._status = ""
        self._thread = threading.Thread(target=self._work, name="sampling", daemon=True)

    @property
    def tokenizer(self) -> Any:
        return self.sampler.tokenizer

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def close(self) -> None:
        """Ends the calls of the sampling thread, and the thread."""
        self._jobs.put(None)
        if (client := self.sampler.sync.client) is not None:
            client.close()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def offer(self, weights: Sequence[models.Params], step: int) -> None:
        """Copies the weights of this step to the host, for the batch of step + lag.

        `weights` are of the steps from step - lag to this one; before step 0, those of step 0. All
        are used in the first call, then the last.
        """
        first = step - len(weights) + 1
        for number, params in enumerate(weights, first):
            if max(number, 0) not in self._offered and (number == step or self._newest is None):
                copied = self.sampler.sync.copied(params, max(number, 0))
                self._offered[max(number, 0)] = copied
        self._newest = self._offered[step]

    def next(self, step: int, position: Position, clock: Clock) -> Sample:
        """The batch of this step; begins the batches up to step + lag.

        The `scalars` contain the events of the batch and of the evaluations since the last call,
        and three times in seconds. `time/sample_ahead_s`: the job that completed the batch, from
        the transfer of its weights on. `time/replicas_idle_s`: the time without any sampling
        before this job. `time/queued_s`: from the end of the job to this call.
        """
        first = step
        if self._position is None:
            self._position = position
            self._thread.start()
            first = step - self.lag
        for number in range(first, min(step, self.num_steps - 1 - self.ready) + 1):
            self._begun[number] = Future()
            weights = self._offered[max(number, 0)]
            self._jobs.put(_Job(number + self.lag, weights, self._begun[number]))
        self._offered.clear()  # every later batch has later weights
        self.sampler.weights = None  # of an evaluation; a later one has later weights
        future = self._begun.pop(step - self.ready)
        for number in [number for number in self._begun if number < step - self.ready]:
            del self._begun[number]  # they completed no batch
        asked = time.monotonic()
        with clock("sample"):
            self._await([future], clock)
            peers = self.sampler.sync.peers
            sample, events, ended, seconds = run_phase(peers, "sample", future.result)
        self._events.update(events)
        events, self._events = dict(self._events), collections.Counter()
        seconds["time/queued_s"] = max(asked - ended, 0.0)
        return sample.with_scalars(events | seconds)

    def sample(
        self, requests: Sequence[SampleRequest], references: Mapping[int, str], **options: Any
    ) -> Scored:
        """Calls `Sampler.sample` with the newest weights, once nothing else is being sampled."""
        self._await(list(self._begun.values()), options.get("clock"))
        began = time.monotonic()
        if self.sampler.weights is None:
            self.sampler.send(self._newest)
        scored = self.sampler.sample(requests, references, **options)
        self._evaluated_s += time.monotonic() - began
        self._events.update(self.count())
        return scored

    def _await(self, futures: Sequence[Future], clock: Clock | None) -> None:
        """Waits until they are done, in all processes; a signal ends the wait.

        An error that only this process knows of is raised at once: the threads `sampling` of the
        other processes wait for the one of this process, so their futures may never be done.
        """
        waited, peers = Future(), self.sampler.sync.peers
        try:
            with peers.phase("sample"), self.sampler.sync.stop.interruptible():
                self._poll(futures, clock)
            waited.set_result(None)
        except Preempted as error:
            waited.set_exception(error)
        run_phase(peers, "sample", waited.result)

    def _poll(self, futures: Sequence[Future], clock: Clock | None) -> None:
        shown = ""
        while True:
            ended = [future for future in futures if future.done()]
            for error in filter(None, (future.exception() for future in ended)):
                if not is_agreed(error):
                    raise error
            if len(ended) == len(futures):
                return
            if clock is not None and self._status != shown:
                shown = self._status
                clock.say(shown)
            time.sleep(POLL_S)

    def _work(self) -> None:
        """Runs in the sampling thread. After a failure, every later batch has failed too."""
        ended, failure, self._evaluated_s = time.monotonic(), None, 0.0
        while (job := self._jobs.get()) is not None:
            began = time.monotonic()
            try:
                if failure is not None:
                    raise failure
                sample, events = self._sampled(job)
            except BaseException as error:  # raised where the batch is taken
                failure = error
                job.done.set_exception(error)
                continue
            idle_s, ended = began - ended - self._evaluated_s, time.monotonic()
            self._evaluated_s = 0.0
            seconds = {"time/sample_ahead_s": ended - began, "time/replicas_idle_s": idle_s}
            job.done.set_result(_Done(sample, events, ended, seconds))

    def _sampled(self, job: _Job) -> tuple[Sample | None, dict[str, float]]:
        clock = Clock(functools.partial(setattr, self, "_status"))
        # Equal weights are sent again too, so that each row of the log counts the same bytes.
        self.thread_sampler.send(job.weights)
        with clock("sample"):
            sample = self.batches.next(job.begins, self._position, clock)
        if sample is not None:
            self._position = sample.position
        return sample, self.count()
