"""The resumable sampler of `evaluate` and `generate`.

Responses are sampled in calls, each for a fixed range of them. What a finished call leaves is
written as one part, and never sampled again. With the JAX engine it depends on nothing outside the
call, so an interrupted command writes the same results, bit for bit.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import ml_collections

from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.jobs.result_directory import Part, ResultDirectory
from semrl_jax.support import compilation
from semrl_jax.support.console import Bar, Reporter
from semrl_jax.support.errors import Preempted
from semrl_jax.types import Rollout


@runtime_checkable
class HasPart(Protocol):
    """Responses that are sampled and written together; `part` names their files."""

    @property
    def part(self) -> str: ...

    @property
    def num_responses(self) -> int: ...


Call = TypeVar("Call", bound=HasPart)

EXIT_PREEMPTED = 75
GRACE_S = 10.0
NUM_PARALLEL = 2
PROGRESS_S = 10.0  # between two lines where the output is no terminal
# Settings of every command that decide which responses are sampled, and what is written of them.
FIELDS = (
    "seed", "model.family", "model.compute_dtype", "rollout.engine", "rollout.weight_dtype",
    "rollout.vllm_quantization", "rollout.max_prompt_tokens", "rollout.max_response_tokens",
    "rollout.stop_token_ids", "rollout.stop_words", "evaluation.stop_strings",
    "evaluation.responses_per_call", "evaluation.metrics",
)  # fmt: skip


@contextlib.contextmanager
def workers(
    config: ml_collections.ConfigDict,
) -> Iterator[Callable[[Callable[[Call], None], Sequence[Call]], None]]:
    """A function that does the calls one after the other, or two at a time, which vLLM joins."""
    if config.rollout.engine == "jax" and not config.rollout.addresses:
        yield lambda work, calls: collections.deque(map(work, calls), maxlen=0)
        return
    threads = concurrent.futures.ThreadPoolExecutor(NUM_PARALLEL, "calls")
    try:

        def run(work: Callable[[Call], None], calls: Sequence[Call]) -> None:
            futures = [threads.submit(work, call) for call in calls]
            for future in concurrent.futures.as_completed(futures):
                future.result()

        yield run
    finally:
        # The threads end when the client is closed, which comes next.
        threads.shutdown(wait=False, cancel_futures=True)


class Progress:
    """Counts responses: on the bar, or in a line every few seconds."""

    def __init__(self, name: str, total: int, done: int, bar: Bar, reporter: Reporter):
        self._name, self._total, self._done = name, total, done
        self._bar, self._reporter = bar, reporter
        self._printed_s = time.monotonic()
        self._lock = threading.Lock()

    def count(self, _rollout: Rollout | None = None) -> None:
        """Counts one response."""
        with self._lock:
            self._done += 1
            pace = self._bar.reach(self._done)
            now = time.monotonic()
            if self._reporter.shows_bars or now - self._printed_s < PROGRESS_S:
                return
            self._printed_s = now
            count = f"{self._name}: {self._done}/{self._total} responses"
            self._reporter.line(", ".join(filter(None, (count, pace))))


def resumable(work: Callable[[Reporter, StopRequest], None], *, quiet: bool) -> int:
    """Does the work of a command that a signal stops (returns 75) and a new start continues."""
    stopped = "stopped; the same command continues"
    reporter, stop = Reporter(quiet=quiet), StopRequest(GRACE_S, EXIT_PREEMPTED, late=stopped)
    try:
        with stop.installed(), compilation.watching(reporter.line):
            work(reporter, stop)
    except Preempted as preempted:
        reporter.notice(f"{preempted}: {stopped}")
        return EXIT_PREEMPTED
    return 0


def request_of(config: ml_collections.ConfigDict, *more: str) -> dict[str, Any]:
    """The settings that decide which responses are sampled: FIELDS and more, by name."""
    request = {
        field: functools.reduce(lambda section, part: section[part], field.split("."), config)
        for field in (*FIELDS, *more)
    }
    if config.evaluation.metrics:
        request["evaluation.metric_options"] = config.evaluation.metric_options.to_dict()
        request["evaluation.metric_series"] = config.evaluation.metric_series
    return request


def sample_calls(
    calls: Sequence[Call],
    sample: Callable[[Call, Callable[[Rollout], None]], Part],
    config: ml_collections.ConfigDict,
    directory: ResultDirectory,
    reporter: Reporter,
    stop: StopRequest,
    name: str,
) -> None:
    """Samples the calls that have no part yet, and writes a part for each."""
    todo = [call for call in calls if not directory.has_part(call.part)]
    total, count = (sum(call.num_responses for call in some) for some in (calls, todo))
    if count < total:
        reporter.line(f"{name}: {total - count} of {total} responses are there already")
    began = time.monotonic()
    with reporter.bar(name, total, "responses", done=total - count) as bar, workers(config) as run:
        progress = Progress(name, total, total - count, bar, reporter)

        def complete(call: Call) -> None:
            part = sample(call, progress.count)
            with stop.deferred():
                directory.write_part(call.part, part)

        run(complete, todo)
    if todo:
        seconds = time.monotonic() - began
        reporter.line(f"{name}: {count} responses in {seconds:.1f} s ({count / seconds:.1f}/s)")
