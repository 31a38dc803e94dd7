"""Waits until all processes of a job have arrived, then lets JAX join them into one program."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable

from semrl_jax.cluster.discovery import ALONE, Place
from semrl_jax.cluster.links import listening_socket
from semrl_jax.cluster.peers import EXIT_PEER_LOST, name_processes
from semrl_jax.support.addresses import is_loopback, split_address
from semrl_jax.support.errors import UserError

GREETING = "semrl_jax/1"
MAX_LINE_BYTES = 4096
GREETING_TIMEOUT_S = 2.0  # for the greeting of one caller; other callers wait in the backlog
RETRY_S = 0.2
REPORT_EVERY_S = 10.0
NO_GRPC_PROXY, NO_PROXY = "no_grpc_proxy", "no_proxy"  # lower case; gRPC reads them in this order


def join(
    place: Place,
    *,
    connect_timeout_s: float,
    heartbeat_timeout_s: float,
    announce: Callable[[str], None] = lambda line: None,
) -> None:
    """Joins this process with the others of its job. A single process returns at once.

    Must be called before anything uses a JAX backend. If processes are missing, JAX's own wait ends
    with abort() and a stack trace that does not name them. Therefore the processes first exchange
    lines of text on the coordinator's port. JAX starts when all have arrived.

    This exchange and JAX's coordination service use neither encryption nor a password, so only the
    cluster's own network may reach the port. A coordinator on loopback binds loopback.

    Args:
      connect_timeout_s: for all processes to arrive, counted from this process's call.
      heartbeat_timeout_s: after this silence of a process, JAX aborts all others.
      announce: takes one line about a wait, every 10 s.

    UserError: process 0 cannot be reached, its port cannot be used, or processes are late, arrived
    twice, or expect another number of processes; or a user's module has made a backend.
    RuntimeError: this process has joined already.
    """
    if place.num_processes == 1:
        return
    meeting = _Meeting(place, connect_timeout_s, announce)
    import jax  # here: `find_place` and `Peers` do not need it

    if jax.distributed.is_initialized():
        raise RuntimeError("this process has joined its job already")
    if place.process_id == 0:
        _receive_all(meeting)
    else:
        _call(meeting)
    host, port = meeting.address
    # gRPC would use the proxy of $http_proxy by default. The exchange above did not use it.
    bypassed = os.environ.get(NO_GRPC_PROXY) or os.environ.get(NO_PROXY) or ""
    os.environ[NO_GRPC_PROXY] = ",".join(filter(None, (bypassed, host)))
    jax.config.update("jax_check_proxy_envs", False)  # switches off JAX's warning about the proxy
    # JAX's preemption service handles SIGTERM itself; the run would not receive the signal.
    jax.config.update("jax_enable_preemption_service", False)
    left_s = max(meeting.left_s, 10.0)
    watchdog = threading.Timer(left_s, _give_up, (place,))
    watchdog.daemon = True
    watchdog.start()
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.num_processes,
            place.process_id,
            # No detection is needed: `place` is known, and all devices are used.
            cluster_detection_method="deactivate",
            # The rule of `listening_socket`.
            coordinator_bind_address=place.coordinator if is_loopback(host) else f"[::]:{port}",
            initialization_timeout=math.ceil(left_s) + 60,  # later than our own limit
            heartbeat_timeout_seconds=max(1, math.ceil(heartbeat_timeout_s)),
        )
    except RuntimeError as error:
        if "before any JAX" not in str(error):
            raise
        raise UserError(
            "a module that algorithms.name or metrics.names names makes a JAX array when it is "
            "imported, which several processes must not do before they are joined; make the array "
            "in its functions."
        ) from error
    finally:
        watchdog.cancel()


class _Meeting:
    """The exchange before JAX starts: its address, its deadline, and progress lines."""

    def __init__(self, place: Place, timeout_s: float, announce: Callable[[str], None]):
        self.place = place
        self.address = split_address(place.coordinator, "distributed.coordinator")
        self._timeout_s, self._announce = timeout_s, announce
        self._deadline = time.monotonic() + timeout_s
        self._next_report = time.monotonic() + REPORT_EVERY_S

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    def report(self, line: str) -> None:
        """Announces a line, unless the last one was less than REPORT_EVERY_S ago."""
        if time.monotonic() >= self._next_report:
            self._announce(f"waits for {line}")
            self._next_report += REPORT_EVERY_S

    def failure(self, missing: set[int], problem: str) -> str:
        """The message when the time is over; `missing` is empty if process 0 never answered."""
        place, limit = self.place, f"distributed.connect_timeout_s={self._timeout_s:g} s"
        coordinator = f"distributed.coordinator={place.coordinator}"
        alone = f"if this is not part of a job, {ALONE} (the place is from {place.source})."
        if missing:
            return (
                f"{name_processes(missing)} of {place.num_processes} did not arrive at "
                f"{coordinator} within {limit}; start them, or, {alone}"
            )
        return (
            f"{coordinator}: process 0 of {place.num_processes} cannot be reached within {limit} "
            f"({problem}); start it on that host, open the port, or, {alone}"
        )


def exit_without_peers(exit_code: int) -> None:
    """Ends this process at its exit without waiting five minutes for the others, as JAX would."""
    # atexit calls the last registered function first
    for function, *args in ((os._exit, exit_code), (sys.stderr.flush,), (sys.stdout.flush,)):
        atexit.register(function, *args)


def _receive_all(meeting: _Meeting) -> None:
    """Process 0: waits until every other process has connected, then tells all to continue."""
    place = meeting.place
    try:
        listener = listening_socket(*meeting.address)
    except OSError as error:
        # Python adds the address to the reason. For an unknown host name there is no strerror.
        reason = (error.strerror or str(error)).split(" (while")[0]
        raise UserError(
            f"distributed.coordinator={place.coordinator} cannot be listened on: {reason}; end "
            "the program that uses the port, or set another port for all processes."
        ) from None
    callers: dict[int, socket.socket] = {}
    refused = ""
    told: set[int] = set()
    with listener, contextlib.ExitStack() as stack:
        stack.callback(lambda: [caller.close() for caller in callers.values()])
        while True:
            _forget_gone(callers)
            missing = set(range(1, place.num_processes)) - callers.keys()
            if not missing:
                break
            left_s = meeting.left_s
            if left_s <= 0:
                _tell(callers, "late", missing)
                raise UserError(meeting.failure(missing, "") + refused)
            meeting.report(f"{name_processes(missing)} at {place.coordinator}")
            if missing != told:
                _tell(callers, "missing", missing)
                told = missing
            listener.settimeout(min(1.0, left_s))
            try:
                caller, address = listener.accept()
            except TimeoutError:
                continue
            if answer := _admit(place, caller, callers):
                refused = f" A process at {address[0]} was refused: {answer}."
            else:
                told = set()  # tell again: a process that reconnected has not been told
        listener.close()  # before "go": JAX needs the port
        _tell(callers, "go")


def _admit(place: Place, caller: socket.socket, callers: dict[int, socket.socket]) -> str:
    """Accepts or refuses a caller; returns the reason if it refuses a process of a job."""
    answer = ""
    try:
        caller.settimeout(GREETING_TIMEOUT_S)
        greeting = rf"{re.escape(GREETING)} (\d{{1,9}}) of (\d{{1,9}})"
        if match := re.fullmatch(greeting, _read_line(caller)):
            process_id, num_processes = int(match[1]), int(match[2])
            _forget_gone(callers)
            expected = place.num_processes
            if num_processes != expected:
                answer = f"it expects {num_processes} processes, process 0 expects {expected}"
            elif not 0 < process_id < place.num_processes or process_id in callers:
                answer = f"process {process_id} has already arrived"
            else:
                callers[process_id] = caller
                return ""
            caller.sendall(f"refused {answer}\n".encode())
    except OSError:
        answer = ""
    caller.close()  # it was refused, or it is an unknown program, such as a port scan
    return answer


def _call(meeting: _Meeting) -> None:
    """Every other process: connects to process 0 and waits until it says to continue."""
    place = meeting.place
    problem = "it does not answer"
    missing: set[int] = set()
    while (left_s := meeting.left_s) > 0:
        meeting.report(f"process 0 at {place.coordinator}: {problem}")
        try:
            with socket.create_connection(meeting.address, min(5.0, left_s)) as connection:
                greeting = f"{GREETING} {place.process_id} of {place.num_processes}\n"
                connection.sendall(greeting.encode())
                problem = "something listens there, but does not answer as process 0 does"
                while True:
                    connection.settimeout(max(meeting.left_s, 0.01))
                    word, _, rest = _read_line(connection).partition(" ")
                    if word == "go":
                        return
                    if word == "refused":
                        raise UserError(
                            f"distributed.coordinator={place.coordinator} refused process "
                            f"{place.process_id}: {rest}; give every process of the job the same "
                            f"number of processes and its own id (here they are from "
                            f"{place.source})."
                        )
                    if word not in ("missing", "late") or not re.fullmatch(r"[\d,]+", rest):
                        break
                    missing = {int(number) for number in rest.split(",") if number}
                    if word == "late":
                        raise UserError(meeting.failure(missing, problem))
                    problem = f"{name_processes(missing)} did not arrive"
        except TimeoutError:
            pass
        except OSError as error:
            missing = set()
            problem = error.strerror or str(error)
        time.sleep(max(0.0, min(RETRY_S, meeting.left_s)))
    raise UserError(meeting.failure(missing, problem))


def _tell(callers: dict[int, socket.socket], word: str, numbers: Iterable[int] = ()) -> None:
    # A line has a maximum length, so only the first ids are named.
    line = f"{word} {','.join(map(str, sorted(numbers)[:400]))}".strip()
    for process_id, caller in list(callers.items()):
        try:
            caller.sendall(f"{line}\n".encode())
        except OSError:
            callers.pop(process_id).close()


def _forget_gone(callers: dict[int, socket.socket]) -> None:
    """Removes callers that closed their connection, such as a process that was restarted."""
    if not callers:
        return
    poll = select.poll()  # select does not support file descriptors above 1023
    by_descriptor = {caller.fileno(): process_id for process_id, caller in callers.items()}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    for descriptor, _ in poll.poll(0):  # after its greeting a process sends nothing more
        callers.pop(by_descriptor[descriptor]).close()


def _read_line(connection: socket.socket) -> str:
    """Reads one line, without its end; OSError if the peer closes or sends no line."""
    line = b""
    # Byte by byte, because the bytes after the line belong to the next read.
    while len(line) < MAX_LINE_BYTES:
        byte = connection.recv(1)
        if byte == b"\n":
            return line.decode(errors="replace")
        if not byte:
            raise ConnectionError("the connection was closed")
        line += byte
    raise ConnectionError("the program that answers there is not process 0")


def _give_up(place: Place) -> None:
    """Ends the process: JAX's wait is a call into C++, which cannot be interrupted."""
    print(
        f"process {place.process_id} of {place.num_processes}: another process was lost while "
        f"all were joining at {place.coordinator}; start the same job again",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_PEER_LOST)
