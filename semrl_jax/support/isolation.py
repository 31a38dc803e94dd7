"""Workers with others' code, such as verifiers: their variables, limits, and lines to them.

The first half is for the process that starts a worker, the second half for the worker itself. Both
write one JSON object per line. Every request has an `id` that cannot be guessed, and its reply has
the same `id`, so that code in the worker can neither answer for it nor shift its answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import resource
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

from semrl_jax.support import cores
from semrl_jax.support.guard import fork_under_guard

MAX_ERROR_CHARS = 200
KILL_TIMEOUT_S = 10.0
# Words in the names of variables that hold credentials. TOKENIZERS_PARALLELISM and PWD stay.
CREDENTIAL = re.compile(
    r"(^|_)(AUTH|KEYS?|PAT|TOKENS?)(_|$)|_PWD$|(TOKEN|APIKEY)$|CREDENTIAL|PASSPHRASE|PASSW|SECRET",
    re.IGNORECASE,
)


def worker_command(module: str) -> list[str]:
    """The command of a worker, whose `main` calls `begin_worker`."""
    usable = ",".join(map(str, cores.helper_cores()))
    return [sys.executable, "-m", module, str(os.getpid()), usable]


def worker_environment(environ: Mapping[str, str], kept_prefix: str) -> dict[str, str]:
    """The variables of a worker: `environ` without credentials, but with names of this prefix."""
    # The worker can import what this process can, the user's modules included.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    single_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    kept = {
        name: value
        for name, value in environ.items()
        if name.startswith(kept_prefix) or not CREDENTIAL.search(name)
    }
    return {**kept, **single_thread, "PYTHONPATH": path}


class Guarded:
    """A worker under its guard, which ends it together with all processes that it started."""

    def __init__(self, module: str, kept_prefix: str, variables: Mapping[str, str], **pipes):
        self._process = subprocess.Popen(  # the guard; the worker is its child
            worker_command(module),
            env={**worker_environment(os.environ, kept_prefix), **variables},
            start_new_session=True,  # so that Ctrl-C does not reach it
            **pipes,
        )

    def kill(self, number: int = signal.SIGTERM) -> None:
        """Has the guard kill all of them; may be called from another thread."""
        if self._process.returncode is None:  # not reaped, so the id is still valid
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def end(self) -> None:
        """Kills all of them, and reaps the guard."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.kill(number)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a child stuck in the kernel
                self._process.wait(timeout=KILL_TIMEOUT_S)


class Line:
    """Asks a worker, over pipes or a socket, and waits for each reply until a deadline."""

    def __init__(self, read: int, write: int, whose: str):
        self._read, self._write, self._whose = read, write, whose
        for fd in (read, write):
            os.set_blocking(fd, False)
        self._received = bytearray()

    def is_quiet(self) -> bool:
        """Whether nothing has come since the last reply."""
        return not self._received and not _is_ready(self._read, select.POLLIN, 0.0)

    def exchange(
        self, request: Mapping[str, Any], timeout_s: float, max_bytes: int
    ) -> dict[str, Any]:
        """The reply to a request, without its id.

        TimeoutError after `timeout_s`, OSError if the worker has ended, ValueError for anything
        else.
        """
        deadline = time.monotonic() + timeout_s
        asked = secrets.token_hex(16)
        unsent = memoryview(json.dumps({**request, "id": asked}).encode() + b"\n")
        while unsent:
            self._wait_for(self._write, select.POLLOUT, deadline)
            unsent = unsent[os.write(self._write, unsent) :]
        while b"\n" not in self._received:
            self._wait_for(self._read, select.POLLIN, deadline)
            chunk = os.read(self._read, 1 << 16)
            if not chunk:
                raise ConnectionResetError(f"{self._whose} ended")
            self._received += chunk
            if len(self._received) > max_bytes:
                raise ValueError(f"{self._whose} replied more than {max_bytes} bytes")
        line, _, self._received = self._received.partition(b"\n")
        try:
            reply = json.loads(line)
        except RecursionError as e:
            raise ValueError(f"{self._whose} replied with nested values") from e
        if not isinstance(reply, dict) or reply.pop("id", None) != asked:
            raise ValueError(f"{self._whose} replied to something that was not asked")
        return reply

    def _wait_for(self, fd: int, event: int, deadline: float) -> None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not _is_ready(fd, event, remaining_s):
            raise TimeoutError(f"{self._whose} took too long")


def _is_ready(fd: int, event: int, timeout_s: float) -> bool:
    """Waits until `fd` is ready. Uses poll: select fails with many open descriptors."""
    poller = select.poll()
    poller.register(fd, event)
    return bool(poller.poll(timeout_s * 1000))


def begin_worker() -> None:
    """Puts this process, started by `worker_command`, on its cores and under a guard."""
    parent_pid, usable = sys.argv[1:3]
    if usable:
        with contextlib.suppress(OSError):  # the system has moved the parent to other cores
            os.sched_setaffinity(0, map(int, usable.split(",")))
    fork_under_guard(int(parent_pid))


def hidden(fd: int) -> int:
    """A duplicate with a random number, which code that guesses descriptors does not find."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = 4096 if limit == resource.RLIM_INFINITY else min(limit, 4096)
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, limit // 4 + secrets.randbelow(limit // 2))


def leave_standard_streams() -> None:
    """Makes standard input empty, and sends prints to standard error."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)


def keep_from_children(*files: BinaryIO) -> None:
    """A process that others' code forks must not read or answer the next request."""

    def leave() -> None:
        null = os.open(os.devnull, os.O_RDWR)
        for file in files:
            os.dup2(null, file.fileno(), inheritable=False)
        os.close(null)

    os.register_at_fork(after_in_child=leave)


def answer(replies: BinaryIO, request: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Writes the reply to a request."""
    replies.write(json.dumps({"id": request["id"], **fields}).encode() + b"\n")
    replies.flush()


def limit_memory(limit_gib: float) -> None:
    """Limits the address space of this process, and writes no core file; 0 is no limit.

    Other systems than Linux have no such limit: macOS refuses to set one.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit_gib and sys.platform == "linux":
        limit = int(limit_gib * 2**30)
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def error_text(error: BaseException) -> str:
    """Name and message of a user's exception, even if its methods fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return "an exception whose text cannot be read"


def error_line(kind: str, text: object) -> str:
    """`kind: text` as one short line of printable characters."""
    line = " ".join(f"{kind}: {text}".split())
    return "".join(c if c.isprintable() else "?" for c in line)[:MAX_ERROR_CHARS]
