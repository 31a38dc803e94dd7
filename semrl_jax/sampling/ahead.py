"""Sampling beside the updates: the batch of step s has the weights of step max(0, s - lag)."""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import ml_collections

from semrl_jax import models
from semrl_jax.clock import Clock
from semrl_jax.cluster.agreement import is_agreed, run_phase
from semrl_jax.errors import Preempted, UserError
from semrl_jax.rollout.memory import available_bytes
from semrl_jax.sampling.dynamic import Rewards
from semrl_jax.sampling.in_flight import InFlightSampler
from semrl_jax.sampling.sampler import Sample, Sampler, Weights
from semrl_jax.sampling.scoring import Scored
from semrl_jax.settings.rollout import num_parts, weight_dtype
from semrl_jax.types import SampleRequest

TOKEN_BYTES = 12  # an id and two log-probabilities
POLL_S = 0.002  # of the main thread: a signal in the wait for a lock could leave it unheld
CLOSE_S = 10.0  # for the other thread to end


class _Job(NamedTuple):
    """What is sampled with the weights of one step; it begins the batch of step `begins`."""

    begins: int
    weights: Weights
    rewards_of: Rewards
    done: Future[_Done]


class _Done(NamedTuple):
    """A job that was done.

    Attributes:
      sample: the batch that it completed, if any.
      events: as `Sampler.counters`, of this batch.
      ended: in time.monotonic().
      seconds: by log key.
    """

    sample: Sample | None
    events: dict[str, float]
    ended: float
    seconds: dict[str, float]


@dataclasses.dataclass
class AheadSampler(Sampler):
    """Samples the batches of later steps in another thread while one is trained on.

    The batch of step s is sampled with the weights of step max(0, s - `rollout.max_staleness`), one
    batch after the other, or as `InFlightSampler` says. So what `next` returns follows from the
    config and the step, as with a `Sampler`, whatever takes how long. An evaluation waits until
    nothing else is being sampled.

    Attributes:
      inner: the sampler of the other thread, with a channel of its own to the other processes.
    """

    inner: Sampler | None = None

    @classmethod
    def of(cls, **parts: Any) -> AheadSampler:
        """Of the parts of a `Sampler`; all processes call it together."""
        channel = parts["peers"].channel("sampling")
        inner = {"peers": channel, "stop": parts["stop"].elsewhere()}
        kind = InFlightSampler if num_parts(parts["config"].rollout) > 1 else Sampler
        return cls(**parts, inner=kind(**parts | inner))

    def __post_init__(self):
        self._lag = self.config.rollout.max_staleness
        # Steps from the weights with which a batch is completed to the batch.
        self._ready = 1 if num_parts(self.config.rollout) > 1 else self._lag
        self._offered: dict[int, Weights] = {}  # by step, those that are still needed
        self._newest: Weights | None = None
        self._begun: dict[int, Future[_Done]] = {}  # by step of the weights; not taken yet
        self._position: tuple[int, int] | None = None  # after the last batch
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._events: collections.Counter[str] = collections.Counter()
        self._evaluated_s = 0.0  # since the last batch, while the other thread has none
        self._status = ""
        self._thread = threading.Thread(target=self._work, name="sampling", daemon=True)

    def __enter__(self) -> AheadSampler:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def close(self) -> None:
        """Ends the calls of the other thread, and the thread."""
        self._jobs.put(None)
        if self.client is not None:
            self.client.close()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def offer(self, weights: Sequence[models.Params], step: int) -> None:
        """Copies the weights of this step to the host, for the batch of step + lag.

        Args:
          weights: of the steps from step - lag to this one; before step 0, those of step 0. All are
            used in the first call, then the last.
        """
        first = step - len(weights) + 1
        for number, params in enumerate(weights, first):
            if max(number, 0) not in self._offered and (number == step or self._newest is None):
                self._offered[max(number, 0)] = self._copied(params, max(number, 0))
        self._newest = self._offered[step]

    def _copied(self, params: models.Params, step: int) -> Weights:
        """The weights in this process's memory, where the other thread may read them."""
        run_phase(self.peers, "sync_weights", self.stop.check)
        keeps = self.client is not None
        with self.stop.deferred():  # a process that leaves in between would block the others
            arrays = [array if keeps else None for array in self._read(params)]
        return Weights(step, lambda: iter(arrays), read_together=False)

    def next(
        self, step: int, position: tuple[int, int], clock: Clock, rewards_of: Rewards
    ) -> Sample:
        """The batch of this step; as `Sampler.next`.

        It begins the batches up to step + lag. The `scalars` contain `time/..._s`: `sample_ahead`
        for what was sampled with the weights that completed the batch, `replicas_idle` before that,
        `queued` from its end to this call.
        """
        first = step
        if self._position is None:
            self._position = position
            self._thread.start()
            first = step - self._lag
        last = min(step, self.config.training.num_steps - 1 - self._ready)
        for number in range(first, last + 1):
            self._begin(number, rewards_of)
        self._offered.clear()  # every later batch has later weights
        self.weights = None  # of an evaluation; a later one has later weights
        future = self._begun.pop(step - self._ready)
        for number in [number for number in self._begun if number < step - self._ready]:
            del self._begun[number]  # they completed no batch
        asked = time.monotonic()
        with clock("sample"):
            self._await([future], clock)
            sample, events, ended, seconds = run_phase(self.peers, "sample", future.result)
        self._events.update(events)
        seconds["time/queued_s"] = max(asked - ended, 0.0)
        return sample._replace(scalars=sample.scalars | seconds)

    def sample(
        self, requests: Sequence[SampleRequest], references: Mapping[int, str], **options: Any
    ) -> Scored:
        """Samples with the newest weights, once nothing else is being sampled."""
        self._await(list(self._begun.values()), options.get("clock"))
        began = time.monotonic()
        if self.weights is None:
            self._send(self._newest)
        scored = super().sample(requests, references, **options)
        self._evaluated_s += time.monotonic() - began
        self._events.update(self.inner.counters())
        return scored

    def counters(self) -> dict[str, float]:
        """As `Sampler.counters`, of the last batch and of the evaluations since the last call."""
        if self._newest is None:  # before the first step
            self.inner.counters()
        found, self._events = dict(self._events), collections.Counter()
        return found

    def _begin(self, step: int, rewards_of: Rewards) -> None:
        """Puts what is sampled with the weights of this step into the queue."""
        self._begun[step] = Future()
        weights = self._offered[max(step, 0)]
        self._jobs.put(_Job(step + self._lag, weights, rewards_of, self._begun[step]))

    def _await(self, futures: Sequence[Future], clock: Clock | None) -> None:
        """Waits until they are done, in all processes; a signal ends the wait.

        An error of this process alone is raised at once: the others wait for its other thread.
        """
        preempted = None
        try:
            with self.peers.phase("sample"), self.stop.interruptible():
                self._poll(futures, clock)
        except Preempted as error:
            preempted = error

        def agree() -> None:
            if preempted is not None:
                raise preempted

        run_phase(self.peers, "sample", agree)

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
        """The other thread. After a failure, every later batch has failed too."""
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
        clock = Clock(self._show)
        self.inner._send(job.weights)  # also equal ones, so that each row counts the same bytes
        sample = self.inner.next(job.begins, self._position, clock, job.rewards_of)
        if sample is not None:
            self._position = sample.position
        return sample, self.inner.counters()

    def _show(self, status: str) -> None:
        self._status = status


def check_memory(config: ml_collections.ConfigDict, architecture: models.DecoderConfig) -> None:
    """Checks that what waits for the updates fits into the memory of this process.

    These are copies of the weights of max_staleness + 1 steps, and the tokens of max_staleness
    batches; their hidden states are dropped once they are measured, which is when a response is
    complete. If the cores are the devices, the copies of `TrainState.earlier` are here too.

    Raises:
      UserError: if it does not fit.
    """
    lag, rollout = config.rollout.max_staleness, config.rollout
    specs = models.tensor_specs(architecture, weight_dtype(config))
    copy = sum(spec.num_bytes for spec in specs)
    tokens = config.data.prompts_per_step * rollout.group_size * rollout.max_response_tokens
    copies = lag + 1 + (lag if jax.default_backend() == "cpu" else 0)
    per_token, what, states = TOKEN_BYTES, "tokens", config.hidden_states
    if num_parts(rollout) > 1 and states.source == "rollout":
        size = architecture.hidden_size * jax.numpy.dtype(states.dtype).itemsize
        per_token += len(config.metrics.layers) * size
        what = "tokens with hidden states"
    needed, limit = copies * copy + lag * tokens * per_token, available_bytes()
    if lag and needed > limit:
        raise UserError(
            f"rollout.max_staleness={lag} keeps {needed / 2**30:.1f} GiB in this process "
            f"({copies} copies of the weights of {copy / 2**30:.1f} GiB, {lag} batches of up to "
            f"{tokens} {what}), and {limit / 2**30:.1f} GiB are free; lower it, or "
            "rollout.weight_dtype to 'bfloat16'."
        )
