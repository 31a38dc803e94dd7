"""SIGTERM and SIGINT: end at a moment when the state in memory is whole."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from semrl_jax.errors import Preempted


class StopRequest:
    """Remembers a signal and raises `Preempted` where the loop allows it.

    Inside `interruptible()` the signal raises at once, even out of a wait; elsewhere the loop asks
    with `check()`. The update donates its buffers, so it is never interrupted.

    The processes of a run share it: `forward` tells the others of a signal, and what another was
    sent comes in by `request`.

    Args:
      grace_s: from the signal on; a process that has not ended by then ends with `exit_code`,
        whatever it is doing.
      exit_code: as above.
      forward: called once, in a thread of its own.
    """

    def __init__(self, grace_s: float, exit_code: int, forward: Callable[[], None] = lambda: None):
        self._signal_name = ""
        self._num_interrupts = 0  # SIGINT
        self._main_thread = 0  # that handles signals, while they are
        self._forward = forward
        self._depth = 0  # of nested interruptible blocks
        self._late = "no checkpoint", "the run goes on from the one before"
        self._watchdog = threading.Timer(grace_s, self._give_up, (grace_s, exit_code))
        self._watchdog.daemon = True

    def check(self) -> None:
        """Raises Preempted if a signal came."""
        if self._signal_name:
            raise Preempted(self._signal_name)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Allows the signal to raise anywhere in the block.

        Whatever else the block raises after a signal is Preempted too: raised between any two
        instructions, it can leave a lock unheld whose owner then fails to release it.
        """
        self.check()
        self._depth += 1
        try:
            yield
        except Exception as error:
            if self._signal_name:
                raise Preempted(self._signal_name) from error
            raise
        finally:
            self._depth -= 1
        self.check()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """A part of an interruptible block that may not be left in the middle.

        Raises Preempted after it where a signal came.
        """
        depth, self._depth = self._depth, 0
        try:
            yield
        finally:
            self._depth = depth
        if depth:
            self.check()

    def checkpoint_saved(self) -> None:
        """Only the report is missing where the process has not ended within the grace time."""
        self._late = "no report", "the checkpoint is saved"

    def request(self) -> None:
        """Does as a signal would; from any thread, once however often it is called."""
        if self._main_thread and not self._signal_name:
            signal.pthread_kill(self._main_thread, signal.SIGTERM)

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopRequest]:
        """Handles SIGTERM and SIGINT; a second SIGINT ends the process the usual way."""
        previous = {
            number: signal.signal(number, self._receive)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        self._main_thread = threading.get_ident()
        try:
            yield self
        finally:
            self._main_thread = 0
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._watchdog.cancel()

    def _receive(self, number, _frame) -> None:
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > 1:
            raise KeyboardInterrupt
        if self._signal_name:
            return
        self._signal_name = signal.Signals(number).name
        self._watchdog.start()
        threading.Thread(target=self._forward, daemon=True).start()
        if self._depth:
            raise Preempted(self._signal_name)

    def _give_up(self, grace_s: float, exit_code: int) -> None:
        """The sender of the signal will not wait longer; what is on disk is whole."""
        missing, consequence = self._late
        print(
            f"{self._signal_name}: {missing} within training.grace_s={grace_s:g} s; {consequence}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(exit_code)
