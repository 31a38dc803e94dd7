"""Sampling in calls, each written when it is done, so that a later start continues."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import ml_collections

from semrl_jax.jobs.result_directory import ResultDirectory
from semrl_jax.support.console import Bar, Reporter
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


@contextlib.contextmanager
def workers(
    config: ml_collections.ConfigDict,
) -> Iterator[Callable[[Callable[[Call], None], Sequence[Call]], None]]:
    """A function that does the calls: one after the other, or two at a time.

    vLLM samples two calls together, so that no slot is idle at the end of a call. The JAX engine
    would sample them one after the other.
    """
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
            if self._reporter.is_terminal or now - self._printed_s < PROGRESS_S:
                return
            self._printed_s = now
            count = f"{self._name}: {self._done}/{self._total} responses"
            self._reporter.line(", ".join(filter(None, (count, pace))))


def sample_calls(
    calls: Sequence[Call],
    sample: Callable[[Call, Callable[[Rollout], None]], None],
    config: ml_collections.ConfigDict,
    directory: ResultDirectory,
    reporter: Reporter,
    name: str,
    label: str = "",
) -> int:
    """Samples the calls that have no part yet; returns how many responses these have.

    Args:
      sample: samples a call and writes its part; it calls the function for each response.
      name: of the progress.
      label: before the line that says how many responses are there already.
    """
    todo = [call for call in calls if not directory.has_part(call.part)]
    total = sum(call.num_responses for call in calls)
    missing = sum(call.num_responses for call in todo)
    done = total - missing
    if done:
        reporter.line(f"{label}{done} of {total} responses are there already")
    with reporter.bar(name, total, "responses", done=done) as bar, workers(config) as run:
        progress = Progress(name, total, done, bar, reporter)
        run(lambda call: sample(call, progress.count), todo)
    return missing
