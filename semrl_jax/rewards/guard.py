"""The parent of a verifier worker: when the worker ends, so does every process it has started.

A process that leaves the worker's session is not reached by a signal to its group, and it loses its
parent when the worker is killed. The kernel gives such orphans to their nearest ancestor that is a
subreaper. That is the guard, which runs no verifier code and is never the first to be killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of prctl
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def fork_under_guard(parent_pid: int) -> None:
    """Forks, and returns in the child alone, the leader of a session of its own.

    This process stays as the guard. It waits until the child has ended, or until SIGTERM, which the
    end of the parent sends, too. Then it kills all its descendants and exits. The child dies with
    the guard. Without Linux there is no guard: the caller goes on as it is.

    Args:
      parent_pid: of the process that started this one.
    """
    if sys.platform != "linux":
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    _die_with_parent(parent_pid, signal.SIGTERM)
    guard_pid = os.getpid()
    worker_pid = os.fork()
    if worker_pid == 0:
        os.setsid()
        _die_with_parent(guard_pid, signal.SIGKILL)
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
    """By group, so that none of a group forks on; those that left in time are found next time."""
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
    """Reaps the children that have ended; their ids, and None where no child is left."""
    reaped: set[int | None] = set()
    try:
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            reaped.add(pid)
    except ChildProcessError:
        reaped.add(None)
    return reaped


def _die_with_parent(parent_pid: int, signal_number: int) -> None:
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal_number)
    if os.getppid() != parent_pid:  # it has ended before
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, value)
