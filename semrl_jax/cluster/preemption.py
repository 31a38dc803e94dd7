"""SIGTERM and SIGINT end a run only while the train state in memory is complete."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from semrl_jax.support.errors import Preempted


class StopRequest:
    """Remembers a signal and raises `Preempted` where the loop allows it.

    Inside `interruptible()` the signal raises at once, even during a wait; elsewhere the loop calls
    `check()`. The update donates its buffers, so it is never interrupted.

    Args:
      grace_s: this long after SIGTERM, the process ends with `exit_code`, even while it works.
      exit_code: as above.
      forward: tells the other processes of the run, which call their `request`. It is called once,
        in its own thread.
      late: what is said when the process ends so; default: that of a training run.
    """

    def __init__(
        self,
        grace_s: float,
        exit_code: int,
        forward: Callable[[], None] = lambda: None,
        late: str = "",
    ):
        self._signal_name = ""
        self._first = threading.Lock()  # taken by the first signal; the next may interrupt it
        self._num_interrupts = 0  # SIGINT
        self._main_thread = 0  # 0 unless the handlers are installed
        self._forward = forward
        self._depth = 0  # of interruptible blocks, nested or of several threads
        self._deferring: set[int] = set()  # threads inside a deferred block
        self._limit = f"within training.grace_s={grace_s:g} s"
        self._late = late or f"no checkpoint {self._limit}; the run goes on from the one before"
        self._watchdog = threading.Timer(grace_s, self._give_up, (exit_code,))
        self._watchdog.daemon = True

    def check(self) -> None:
        """Raises Preempted if a signal came."""
        if self._signal_name:
            raise Preempted(self._signal_name)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Allows the signal to raise anywhere in the block.

        Any other exception after a signal becomes Preempted. It may be a consequence: for example,
        a signal inside `Condition.wait` can leave a lock unheld, and its release then fails.
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
        """Part of an interruptible block that must finish; Preempted is raised only after it."""
        thread = threading.get_ident()
        if thread in self._deferring:  # the outer block must finish too
            yield
            return
        self._deferring.add(thread)
        try:
            yield
        finally:
            self._deferring.discard(thread)
        if self._depth:
            self.check()

    def elsewhere(self) -> StopElsewhere:
        return StopElsewhere(self.check)

    def checkpoint_saved(self) -> None:
        """From now on, the report and copies are missing if the grace time is exceeded."""
        self._late = f"report and copies not complete {self._limit}; the checkpoint is saved"

    def request(self) -> None:
        """Has the effect of a signal. Any thread may call it; further calls do nothing."""
        if self._main_thread and not self._signal_name:
            signal.pthread_kill(self._main_thread, signal.SIGTERM)

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopRequest]:
        """Handles SIGTERM and SIGINT in the main thread; a second SIGINT ends the process."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {
            number: signal.signal(number, self._receive)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        numbers, pipe = os.pipe()
        os.set_blocking(pipe, False)
        threading.Thread(target=self._count_grace, args=(numbers,), daemon=True).start()
        wakeup = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
        self._main_thread = threading.get_ident()
        try:
            yield self
        finally:
            self._main_thread = 0
            signal.set_wakeup_fd(wakeup)
            os.close(pipe)  # which ends the thread
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._watchdog.cancel()

    def _count_grace(self, numbers: int) -> None:
        """Starts the grace time at the first SIGTERM.

        The main thread runs no handler while it compiles a program or waits for a device.
        """
        started = False
        with open(numbers, "rb", buffering=0) as received:
            while number := received.read(1):
                if number[0] == signal.SIGTERM and not started:
                    started = True
                    self._watchdog.start()

    def _receive(self, number, _frame) -> None:
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > 1:
            raise KeyboardInterrupt
        if not self._first.acquire(blocking=False):
            return
        self._signal_name = signal.Signals(number).name
        threading.Thread(target=self._forward, daemon=True).start()
        if self._depth and not self._deferring:
            raise Preempted(self._signal_name)

    def _give_up(self, exit_code: int) -> None:
        """Ends the process: the sender would kill it soon. The files on disk are complete."""
        print(f"SIGTERM: {self._late}", file=sys.stderr, flush=True)
        os._exit(exit_code)


class StopElsewhere:
    """A `StopRequest` in a thread that no signal interrupts: it only checks."""

    def __init__(self, check: Callable[[], None]):
        self.check = check

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """See `StopRequest.interruptible`; here the caller ends the waits in the block."""
        self.check()
        try:
            yield
        except Exception:
            self.check()
            raise
        self.check()

    deferred = contextlib.nullcontext
