"""The parent of a worker with others' code: when it ends, every process that it started ends too.

A signal to the worker's process group does not reach a process that has left its session, and such
a process has no parent once the worker is killed. The kernel gives an orphan to its nearest
ancestor that is a subreaper. This is the guard. It runs no such code and is never killed first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of prctl
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def fork_under_guard(parent_pid: int) -> None:
    """Forks and returns only in the child, which leads its own session.

    This process stays as the guard. It waits until the child has ended, or until SIGTERM, which it
    also gets when its parent ends. Then it kills all its descendants and exits. The child dies with
    the guard. On other systems than Linux there is no guard.
    """
    if sys.platform != "linux":
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    die_with_parent(parent_pid, signal.SIGTERM)
    guard_pid = os.getpid()
    worker_pid = os.fork()
    if worker_pid == 0:
        os.setsid()
        die_with_parent(guard_pid, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return
    try:
        os.closerange(0, 2)  # the pipes end with the worker
        while signal.sigwait(_SIGNALS) == signal.SIGCHLD and worker_pid not in _reaped():
            pass
        _kill_descendants()
    finally:
        os._exit(0)


def _kill_descendants() -> None:
    """Kills whole groups, so that no member can fork; processes that left are found next time."""
    while True:
        children: dict[int, list[tuple[int, int]]] = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                _, parent, group, *_ = file.read().rpartition(b")")[2].split()
                children.setdefault(int(parent), []).append((int(entry), int(group)))
        below = [os.getpid()]
        for pid in below:
            for child, group in children.get(pid, ()):
                below.append(child)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
        if None in _reaped():
            return
        time.sleep(0.001)


def _reaped() -> set[int | None]:
    """Reaps the children that have ended; returns their ids, and None if no child is left."""
    reaped: set[int | None] = set()
    try:
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            reaped.add(pid)
    except ChildProcessError:
        reaped.add(None)
    return reaped


def die_with_parent(parent_pid: int, signal_number: int) -> None:
    """Asks the kernel to send this process, a new child, a signal when its parent ends."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal_number)
    if os.getppid() != parent_pid:  # it ended before this call
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)
