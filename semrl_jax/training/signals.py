"""SIGTERM and SIGINT: end at a moment when the state in memory is whole."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator


class Preempted(Exception):
    """The run was asked to end; the train state in memory is that of the last finished step."""


class StopRequest:
    """Remembers a signal and raises `Preempted` where the loop allows it.

    Inside `interruptible()` the signal raises at once, even out of a wait; elsewhere the loop asks
    with `check()`. The update donates its buffers, so it is never interrupted.
    """

    def __init__(self):
        self.requested_at: float | None = None
        self.signal_name = ""
        self._interruptible = False

    def check(self) -> None:
        """Raises Preempted if a signal came."""
        if self.requested_at is not None:
            raise Preempted(self.signal_name)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Allows the signal to raise anywhere in the block."""
        self.check()
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False
        self.check()

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopRequest]:
        """Handles SIGTERM and SIGINT; a second SIGINT ends the process the usual way."""
        previous = {
            number: signal.signal(number, self._receive)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _receive(self, number, _frame) -> None:
        if self.requested_at is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        first = self.requested_at is None
        if first:
            self.requested_at = time.monotonic()
            self.signal_name = signal.Signals(number).name
        if first and self._interruptible:
            raise Preempted(self.signal_name)
