"""Connections between the processes of one run: handshake, time limits, sending and receiving.

The handshake is that of `multiprocessing.connection`: both ends prove that they know the run's
secret. This module does not load JAX.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.connection
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from semrl_jax.support.addresses import is_loopback
from semrl_jax.support.errors import UserError

BACKLOG = 4096
HANDSHAKE_TIMEOUT_S = 30.0  # between two of its messages; unknown programs may send none
FLUSH_TIMEOUT_S = 2.0
MAX_MESSAGE_BYTES = 64 * 2**20


class Link:
    """A connection to another process, and the last state received from it; a thread sends."""

    def __init__(self, index: int, name: str, connection: multiprocessing.connection.Connection):
        self.index, self.name = index, name
        self.heard = self.phase_began = time.monotonic()
        self.phase = "start"
        self.left = False  # whether it announced its orderly end
        self._connection = connection
        self._outgoing: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._write, name=f"to process {index}", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Queues a message. If the other end is gone, only the reader gets the error."""
        send_all([self], message)

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yields messages as they arrive; OSError or EOFError when the connection ends."""
        while True:
            yield json.loads(self._connection.recv_bytes(MAX_MESSAGE_BYTES))

    def sent(self) -> threading.Event:
        """Returns an event that is set once all earlier messages are sent."""
        event = threading.Event()
        self._outgoing.put(event)
        return event

    def _write(self) -> None:
        while True:
            item = self._outgoing.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            with contextlib.suppress(OSError):
                self._connection.send_bytes(item)


def send_all(links: Iterable[Link], message: dict[str, Any]) -> None:
    """`Link.send` to several. The message is encoded once: it may have tens of megabytes."""
    data = json.dumps(message).encode()
    for link in links:
        link._outgoing.put(data)


def flush(links: Iterable[Link]) -> None:
    """Waits until queued messages are sent, for at most FLUSH_TIMEOUT_S altogether."""
    deadline = time.monotonic() + FLUSH_TIMEOUT_S
    for event in [link.sent() for link in links]:
        event.wait(max(0.0, deadline - time.monotonic()))


class Listener:
    """Process 0's listening socket; `address` is where the others connect.

    A loopback host listens only there, any other host on all addresses; port 0 takes a free port.
    `key` is the secret of the run.
    """

    def __init__(self, host: str, key: bytes, port: int = 0):
        self._socket = listening_socket(host, port)
        self._key = key
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    def accept(self, arrived: Callable[[Link], None]) -> None:
        """Accepts callers that know the secret, each in its own thread, until `close`."""
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._socket.accept()
                threading.Thread(target=self._admit, args=(caller, arrived), daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # shutdown wakes the accepting thread
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _admit(self, caller: socket.socket, arrived: Callable[[Link], None]) -> None:
        # Unknown callers, and callers that gave up, are ignored.
        with contextlib.suppress(OSError, EOFError, multiprocessing.AuthenticationError):
            with _shaking_hands(caller) as connection:
                multiprocessing.connection.deliver_challenge(connection, self._key)
                multiprocessing.connection.answer_challenge(connection, self._key)
                hello = json.loads(connection.recv_bytes(MAX_MESSAGE_BYTES))
            arrived(Link(hello["hello"], hello["name"], connection))


def call(address: tuple[str, int], key: bytes, hello: dict[str, Any], timeout_s: float) -> Link:
    """Connects to process 0; UserError if no process that knows the secret answers in time."""
    host, port = address
    try:
        caller = socket.create_connection(address, timeout=timeout_s)
        with _shaking_hands(caller) as connection:
            multiprocessing.connection.answer_challenge(connection, key)
            multiprocessing.connection.deliver_challenge(connection, key)
            connection.send_bytes(json.dumps(hello).encode())
    except (OSError, EOFError, multiprocessing.AuthenticationError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "it closed the connection"
        raise UserError(
            f"process {hello['hello']} ({hello['name']}) cannot connect to process 0 at {host} "
            f"port {port} within distributed.connect_timeout_s={timeout_s:g} s ({reason}); the "
            "system picks that port, so open all ports between the nodes of a job."
        ) from None
    return Link(0, f"{host}:{port}", connection)


def listening_socket(host: str, port: int) -> socket.socket:
    """Listens on the host if it is loopback, else on all addresses; no second job can share it."""
    if is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
        )
    return socket.create_server(("", port), backlog=BACKLOG)


@contextlib.contextmanager
def _shaking_hands(end: socket.socket) -> Iterator[multiprocessing.connection.Connection]:
    """The socket as a connection. Inside the block, its messages have a time limit."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = multiprocessing.connection.Connection(os.dup(end.fileno()))
    with end:  # socket options also apply to the duplicate
        _limit(end, HANDSHAKE_TIMEOUT_S)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        _limit(end, 0.0)


def _limit(end: socket.socket, seconds: float) -> None:
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))
