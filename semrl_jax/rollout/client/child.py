"""A replica in a child process, with another Python environment; it ends with this process."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from semrl_jax.rollout.wire.auth import TOKEN_VARIABLE, new_token
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import through_no_link

END_S = 20.0  # from closing its standard input to SIGKILL
PROGRESS_EVERY_S = 10.0


class ChildReplica(contextlib.AbstractContextManager):
    """`launch.rollout` on a free loopback port; it is started again whenever it ends.

    It ends with its standard input, and so with this process, killed or not. Use it in a `with`.

    Args:
      command: serves rollouts; `--port` and `--until_stdin_closes` are appended.
      token: that the client must send; None makes a random one.
      directory: working directory of the child.
      log: file to which the child's output is appended.
      progress: takes one line about a wait or a restart.
      awaited: the constructor returns once the child listens; else call `await_listening`.

    UserError: the program does not exist, or the child ends or does not listen in time.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        token: str | None = None,
        directory: str | os.PathLike[str],
        log: str | os.PathLike[str],
        start_timeout_s: float = 300.0,
        progress: Callable[[str], None] = print,
        awaited: bool = True,
    ):
        self.token = new_token() if token is None else token
        # Bound but not listening: no other process is given the port while the child starts. A
        # server that sets SO_REUSEADDR can still listen on it.
        self._reservation = socket.socket()
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reservation.bind(("127.0.0.1", 0))
        self._port = self._reservation.getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"
        self._command = [*command, f"--port={self._port}", "--until_stdin_closes"]
        self._directory, self._log, self._progress = directory, pathlib.Path(log), progress
        self._closing = threading.Event()
        self._lock = threading.Lock()  # after `close` has begun, no child is started
        self._watcher = threading.Thread(target=self._watch, name="child-replica", daemon=True)
        self._started, self._timeout_s = time.monotonic(), start_timeout_s
        self._process = self._start()
        if awaited:
            try:
                self.await_listening()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        with self._lock:
            self._closing.set()
        self._end()
        if self._watcher.is_alive():
            self._watcher.join()

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _start(self) -> subprocess.Popen:
        try:
            with open(self._log, "ab", opener=through_no_link) as log:
                return subprocess.Popen(
                    self._command,
                    cwd=self._directory,
                    env={**os.environ, TOKEN_VARIABLE: self.token},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is sent to this process, which ends the child
                )
        except OSError as error:
            raise UserError(
                f"the rollout replica cannot be started: {self._command[0]}: {error.strerror}."
            ) from None

    def await_listening(self) -> None:
        """Returns once the child listens; from then on it is started again. Called once."""
        started = last_report = self._started
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
                return self._watcher.start()
            now = time.monotonic()
            if self._process.poll() is not None:
                lines = self._log.read_text(errors="replace").strip().splitlines() or ["nothing"]
                raise UserError(f"the rollout replica did not start: {lines[-1]} ({self._log})")
            if now - started > self._timeout_s:
                raise UserError(
                    f"the rollout replica does not listen after {self._timeout_s:g} s "
                    f"(rollout.connect_timeout_s); {self._log} has what it printed."
                )
            if now - last_report > PROGRESS_EVERY_S:
                last_report = now
                self._progress(f"waiting for the rollout replica to start ({now - started:.0f} s)")
            time.sleep(0.1)

    def _end(self) -> None:
        self._process.stdin.close()
        if not self._watcher.is_alive():  # before it listens, it does not look at its input
            self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reservation.close()

    def _watch(self) -> None:
        while True:
            code = self._process.wait()
            self._closing.wait(1.0)
            with self._lock:
                if self._closing.is_set():
                    return
                self._progress(
                    f"the rollout replica ended with code {code}; started again ({self._log})"
                )
                try:
                    self._process = self._start()
                except UserError as error:  # perhaps for lack of memory: tried again
                    self._progress(str(error))
