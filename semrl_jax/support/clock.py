"""Wall time of the phases of one step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from jax.profiler import TraceAnnotation

Item = TypeVar("Item")


class Clock:
    """Adds up seconds by phase; `say` gets the name of each phase that begins outside another."""

    def __init__(self, say: Callable[[str], None] = lambda phase: None):
        self.say = say
        self._num_open = 0
        self._started = time.monotonic()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Times the block as part of `phase`."""
        if not self._num_open:
            self.say(phase.replace("_", " "))
        self._num_open += 1
        started = time.monotonic()
        try:
            with TraceAnnotation(phase):  # a name in the profile, if one is being recorded
                yield
        finally:
            self._num_open -= 1
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - started

    def iterate(self, phase: str, items: Iterable[Item]) -> Iterator[Item]:
        """Times only the wait for items, not the work of the caller."""
        iterator = iter(items)
        while True:
            with self(phase):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def seconds(self, phase: str) -> float:
        """Seconds spent in a phase so far."""
        return self._seconds.get(phase, 0.0)

    def scalars(self) -> dict[str, float]:
        """All phases, and `time/step_s` since the clock was made."""
        phases = self._seconds | {"step": time.monotonic() - self._started}
        return {f"time/{phase}_s": seconds for phase, seconds in phases.items()}
