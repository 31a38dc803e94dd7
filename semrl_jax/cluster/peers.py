"""The processes of one run: small values that they exchange, and detection of a lost process.

Every process holds one connection to process 0, in addition to JAX's own, which would end the
process with pages of C++ output that do not name the lost peer. Messages are small JSON objects.
This module does not load JAX.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from semrl_jax.cluster.links import Link, Listener, call, flush, send_all
from semrl_jax.support.errors import UserError

EXIT_MISTAKE = 2
EXIT_PEER_LOST = 76
BEATS_PER_TIMEOUT = 4
MAX_GATHERED_BYTES = 2**25  # of all processes in one message; a link takes twice as much


START, AFTER = "start", "after "  # phases of a process before its first and between two
MAIN = ""  # the channel of the main thread
_Place = tuple[str, int]  # a channel, and the number of a round on it


class PeerFailed(RuntimeError):
    """Another process could not do its part; the message names it."""


class Peers:
    """This process's index among all processes, and its connection to process 0.

    If a process is lost (killed, stopped, disconnected, or in one phase for longer than
    `phase_timeout_s`), all others end with EXIT_PEER_LOST and one line on stderr that names it.

    `on_stop` is called, from another thread, when another process calls `stop_all`.

    Args:
      index: of this process; process 0 listens.
      count: number of processes; with 1 there are no connections.
      listener: in process 0 only.
      address, key: where process 0 listens, and the secret of this run.
      connect_timeout_s: for all others to connect to process 0; UserError in every process if not.
      heartbeat_timeout_s: a process that sends nothing for this long is lost.
      phase_timeout_s: limit of a wait in `gather`, and of one phase of a process, for example when
        a device hangs in a program of all processes.
      progress: takes one line about a wait, in process 0, every `progress_every_s`.
    """

    def __init__(
        self,
        index: int = 0,
        count: int = 1,
        *,
        listener: Listener | None = None,
        address: tuple[str, int] | None = None,
        key: bytes = b"",
        connect_timeout_s: float = 300.0,
        heartbeat_timeout_s: float = 60.0,
        phase_timeout_s: float = 3600.0,
        progress: Callable[[str], None] = print,
        progress_every_s: float = 10.0,
    ):
        self.index, self.count = index, count
        self.on_stop: Callable[[], None] = lambda: None
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._phase_timeout_s = phase_timeout_s
        self._progress, self._progress_every_s = progress, progress_every_s
        self._changed = threading.Condition()
        self._numbers: dict[str, Iterator[int]] = {}  # of the rounds of each channel
        self._results: dict[_Place, list] = {}
        self._phase, self._phase_began = START, time.monotonic()
        self._closing = threading.Event()
        self._ending = threading.Lock()  # acquired once, so that only the first reason is printed
        self._links: dict[int, Link] = {}  # in process 0: to all others; elsewhere: to process 0
        self._rounds: dict[_Place, _Round] = {}  # in process 0 only
        if count == 1:
            return
        if index == 0:
            assert listener is not None
            self._accept(listener, connect_timeout_s)
        else:
            hello = {"hello": index, "name": f"{socket.gethostname()}:{os.getpid()}"}
            self._links[0] = call(address, key, hello, connect_timeout_s)
        for link in self._links.values():
            threading.Thread(target=self._read, args=(link,), daemon=True).start()
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Sets the phase that the others name if this process is lost in the block or after it."""
        before = self._phase
        self._enter(name)
        try:
            yield
        finally:
            is_outermost = before == START or before.startswith(AFTER)
            self._enter(f"{AFTER}{name}" if is_outermost else before)

    def gather(self, phase: str, value: Any) -> list:
        """The values of all processes, which JSON can hold; RuntimeError for different phases."""
        if self.count == 1:
            return [value]
        with self.phase(phase):
            return self._gather(MAIN, phase, value)

    def channel(self, name: str) -> Channel:
        """A channel for another thread than the main one; every process must ask for it, once."""
        return Channel(self, name)

    def _gather(self, channel: str, phase: str, value: Any) -> list:
        place = channel, next(self._numbers.setdefault(channel, itertools.count(1)))
        message = {"round": place, "phase": phase, "value": value}
        if self.index == 0:
            self._arrived(0, message)
        else:
            self._links[0].send(message)
        with self._changed:
            while place not in self._results:
                self._changed.wait(1.0)
            arrived = self._results.pop(place)
        phases = [entry["phase"] for entry in arrived]
        if len(set(phases)) > 1:
            raise RuntimeError(f"the processes are in different phases: {phases}.")
        return [entry["value"] for entry in arrived]

    def stop_all(self) -> None:
        """Calls `on_stop` in every other process, because this process was asked to end."""
        self._send_all({"stop": self.index})

    def fail(self, reason: str, exit_code: int) -> None:
        """Ends the other processes, which cannot continue without this one; then returns.

        If this process failed because another one was lost, the lost one is named instead, and this
        process ends like the others.
        """
        if self.count == 1 or self._closing.is_set():
            return
        # If a peer was lost, the failed collective may be noticed here before its closed
        # connection. Wait, so that the connection can be noticed too.
        time.sleep(1.0)
        self._closing.set()  # the others end at once; from here on this is not a loss
        self._send_all({"failed": self.index, "reason": reason, "exit_code": exit_code})
        flush(self._links.values())

    def close(self) -> None:
        """Closes this process's part in order; call it only after a last `gather`."""
        self._closing.set()
        self._send_all({"bye": self.index})
        flush(self._links.values())

    def _enter(self, phase: str) -> None:
        self._phase, self._phase_began = phase, time.monotonic()
        self._beat()
        flush(self._links.values())  # the others must know the phase even if the process dies in it

    def _beat(self) -> None:
        self._send_all({"phase": self._phase, "phase_s": time.monotonic() - self._phase_began})

    def _send_all(self, message: dict[str, Any], but: int | None = None) -> None:
        send_all([link for link in list(self._links.values()) if link.index != but], message)

    def _accept(self, listener: Listener, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        everyone = set(range(1, self.count))

        def arrived(link: Link) -> None:
            self._links[link.index] = link

        threading.Thread(target=listener.accept, args=(arrived,), daemon=True).start()
        while missing := everyone - self._links.keys():
            if time.monotonic() > deadline:
                reason = (
                    f"{name_processes(missing)} did not connect to process 0 at port "
                    f"{listener.address[1]} within distributed.connect_timeout_s={timeout_s:g} s; "
                    "the system picks that port, so open all ports between the nodes of a job."
                )
                self._send_all({"failed": 0, "reason": reason, "exit_code": EXIT_MISTAKE})
                flush(self._links.values())
                raise UserError(reason)
            time.sleep(0.05)
        listener.close()

    def _read(self, link: Link) -> None:
        try:
            for message in link.receive():
                link.heard = time.monotonic()
                if "bye" in message:
                    link.left = True
                elif "round" in message and self.index == 0:
                    self._arrived(link.index, message)
                elif "round" in message:
                    self._finished(tuple(message["round"]), message["arrived"])
                elif "phase" in message:
                    link.phase = message["phase"]
                    link.phase_began = link.heard - message["phase_s"]
                elif "stop" in message:
                    if self.index == 0:  # only process 0 has links to all
                        self._send_all(message, but=message["stop"])
                    self.on_stop()
                elif "lost" in message:
                    self._end(message["lost"])
                elif "failed" in message:
                    reason = f"process {message['failed']} failed: {message['reason']}"
                    line = f"{reason.rstrip('.')}; all processes stop"
                    self._exit(message, line, message["exit_code"])
        except (OSError, EOFError):
            if not link.left and not self._closing.is_set():
                self._lost(link, "its connection closed")

    def _watch(self) -> None:
        """Sends heartbeats; finds processes that send none or that all others wait for."""
        pause = self._heartbeat_timeout_s / BEATS_PER_TIMEOUT
        beat = time.monotonic()
        while not self._closing.wait(min(pause, 0.5)):
            now = time.monotonic()
            if now - beat >= pause:
                beat = now
                self._beat()
            for link in self._links.values():
                if not link.left and now - link.heard > self._heartbeat_timeout_s:
                    self._lost(link, f"it sent nothing for {now - link.heard:.0f} s")
            with self._changed:
                rounds = list(self._rounds.values())
                main = [one for (channel, _), one in self._rounds.items() if channel == MAIN]
            waiting = {index for one in main for index in one.arrived}
            for one in rounds:
                self._tell_of(one, now)
            if self.index == 0:
                self._look_for_stuck(rounds, waiting, now)

    def _look_for_stuck(self, rounds: list[_Round], waiting: set[int], now: float) -> None:
        """Ends all processes if a wait or the phase of a working process takes too long."""
        at_work = [index for index in range(self.count) if index not in waiting]
        began = [one.began for one in rounds]
        began += [self._links[index].phase_began for index in at_work if index > 0]
        began += [self._phase_began] if 0 in at_work else []
        if now - min(began, default=now) > self._phase_timeout_s:
            self._end(
                f"{'; '.join(map(self._describe, at_work))} did not finish it within "
                f"distributed.phase_timeout_s={self._phase_timeout_s:g} s"
            )

    def _tell_of(self, waiting: _Round, now: float) -> None:
        missing = [index for index in range(self.count) if index not in waiting.arrived]
        if missing and now - waiting.told > self._progress_every_s:
            waiting.told = now
            self._progress(
                f"waiting for {'; '.join(map(self._describe, missing))} to end phase "
                f"{waiting.phase!r} ({now - waiting.began:.0f} s; given up after "
                f"{self._phase_timeout_s:g} s)"
            )

    def _arrived(self, index: int, message: dict) -> None:
        place = tuple(message["round"])
        with self._changed:
            waiting = self._rounds.setdefault(place, _Round(message["phase"]))
            waiting.arrived[index] = {"phase": message["phase"], "value": message["value"]}
            if len(waiting.arrived) < self.count:
                return
            del self._rounds[place]
        arrived = [waiting.arrived[i] for i in range(self.count)]
        self._send_all({"round": place, "arrived": arrived})
        self._finished(place, arrived)

    def _finished(self, place: _Place, arrived: list) -> None:
        with self._changed:
            self._results[place] = arrived
            self._changed.notify_all()

    def _describe(self, index: int) -> str:
        if index == self.index:
            return f"process {index} (in {self._phase!r})"
        link = self._links[index]
        seconds = time.monotonic() - link.phase_began
        return f"process {index} ({link.name}, in {link.phase!r} for {seconds:.0f} s)"

    def _lost(self, link: Link, how: str) -> None:
        phase = link.phase.removeprefix(AFTER)
        self._end(f"process {link.index} ({link.name}, last in phase {phase!r}) is lost: {how}")

    def _end(self, reason: str) -> NoReturn:
        """Ends this process immediately: the main thread waits for something that cannot arrive."""
        end = (
            f"all {self.count} processes stop, the same command continues from the last checkpoint"
        )
        self._exit({"lost": reason}, f"{reason}; {end}", EXIT_PEER_LOST)

    def _exit(self, message: dict[str, Any], line: str, exit_code: int) -> NoReturn:
        """Ends all processes. Connections that then close are not reported as losses."""
        self._ending.acquire()
        self._send_all(message, but=message.get("failed"))
        flush(self._links.values())
        print(line, file=sys.stderr, flush=True)
        os._exit(exit_code)


class Channel:
    """The processes as another thread than the main one sees them; with the methods it needs.

    A wait here has the time limit that a wait of the main thread has. The phases here are not the
    phases of the process.
    """

    def __init__(self, peers: Peers, name: str):
        self.index, self.count = peers.index, peers.count
        self._peers, self._name = peers, name

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """The main thread decides about the phase that the others name."""
        return contextlib.nullcontext()

    def gather(self, phase: str, value: Any) -> list:
        """See `Peers.gather`; gathers the values that this channel sends."""
        if self.count == 1:
            return [value]
        return self._peers._gather(self._name, phase, value)

    def gather_bytes(self, phase: str, data: bytes) -> list[bytes]:
        """The data of every process, through process 0: the mesh is the main thread's."""
        size = MAX_GATHERED_BYTES // self.count
        parts: list[list[bytes]] = [[] for _ in range(self.count)]
        for start in range(0, max(self.gather(phase, len(data))), size):
            text = base64.b64encode(data[start : start + size]).decode()
            for part, arrived in zip(parts, self.gather(phase, text)):
                part.append(base64.b64decode(arrived))
        return [b"".join(part) for part in parts]


Processes = Peers | Channel  # what exchanges values: of the main thread, or of another one


class _Round:
    """The processes that have arrived at one `gather`."""

    def __init__(self, phase: str):
        self.phase = phase
        self.began = self.told = time.monotonic()
        self.arrived: dict[int, dict] = {}


def name_processes(ids: Iterable[int]) -> str:
    """Names processes briefly: 'process 3', 'processes 1, 4-7'."""
    ids = sorted(ids)
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"process {text}" if len(ids) == 1 else f"processes {text}"
