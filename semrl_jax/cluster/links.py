"""Connections between the processes of one run: who may connect, within what time, and how.

TCP over IPv4 or IPv6, and the handshake of `multiprocessing.connection`: both ends prove that they
know the run's secret. Loads no JAX.
"""

from __future__ import annotations

import contextlib
import ipaddress
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

from semrl_jax.errors import UserError

BACKLOG = 4096
HANDSHAKE_TIMEOUT_S = 30.0  # between two of its messages; a stranger stays silent
FLUSH_TIMEOUT_S = 2.0
MAX_MESSAGE_BYTES = 64 * 2**20


class Link:
    """A connection to another process, and what was last heard of it.

    Messages leave by a thread of their own: one that is stopped, and takes none, holds nobody up.
    """

    def __init__(self, index: int, name: str, connection: multiprocessing.connection.Connection):
        self.index, self.name = index, name
        self.heard = self.phase_began = time.monotonic()
        self.phase = "start"
        self.left = False  # it said that it goes
        self._connection = connection
        self._outgoing: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._write, name=f"to process {index}", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Sends soon, unless the other end is gone: the reader of this connection learns of it."""
        self._outgoing.put(json.dumps(message).encode())

    def receive(self) -> Iterator[dict[str, Any]]:
        """Messages as they come; OSError or EOFError when the connection ends."""
        while True:
            yield json.loads(self._connection.recv_bytes(MAX_MESSAGE_BYTES))

    def sent(self) -> threading.Event:
        """Is set once all that was sent before has left."""
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


def flush(links: Iterable[Link]) -> None:
    """Gives what was sent the time to leave; a process that takes nothing is not waited for."""
    deadline = time.monotonic() + FLUSH_TIMEOUT_S
    for event in [link.sent() for link in links]:
        event.wait(max(0.0, deadline - time.monotonic()))


class Listener:
    """Process 0's end; `address` is where the others connect."""

    def __init__(self, host: str, key: bytes, port: int):
        self._socket = listening_socket(host, port)
        self._key = key
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    def accept(self, arrived: Callable[[Link], None]) -> None:
        """Takes in who knows the secret, each in a thread of its own, until `close`."""
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._socket.accept()
                threading.Thread(target=self._admit, args=(caller, arrived), daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _admit(self, caller: socket.socket, arrived: Callable[[Link], None]) -> None:
        # A stranger, or one who gave up, is let go.
        with contextlib.suppress(OSError, EOFError, multiprocessing.AuthenticationError):
            with _shaking_hands(caller) as connection:
                multiprocessing.connection.deliver_challenge(connection, self._key)
                multiprocessing.connection.answer_challenge(connection, self._key)
                hello = json.loads(connection.recv_bytes(MAX_MESSAGE_BYTES))
            arrived(Link(hello["hello"], hello["name"], connection))


def listen(host: str, key: bytes, port: int = 0) -> Listener:
    """Listens at a loopback address, or with any other host on all of them; port 0: a free one."""
    return Listener(host, key, port)


def call(address: tuple[str, int], key: bytes, hello: dict[str, Any], timeout_s: float) -> Link:
    """Connects to process 0.

    Raises:
      UserError: if nothing that knows the secret answers in time.
    """
    host, port = address
    try:
        caller = socket.create_connection(address, timeout=timeout_s)
        with _shaking_hands(caller) as connection:
            multiprocessing.connection.answer_challenge(connection, key)
            multiprocessing.connection.deliver_challenge(connection, key)
            connection.send_bytes(json.dumps(hello).encode())
    except (OSError, EOFError, multiprocessing.AuthenticationError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "it hung up"
        raise UserError(
            f"process {hello['hello']} ({hello['name']}) cannot connect to process 0 at {host} "
            f"port {port} within distributed.connect_timeout_s={timeout_s:g} s ({reason}); the "
            "system picks that port, so open all ports between the nodes of a job."
        ) from None
    return Link(0, f"{host}:{port}", connection)


def listening_socket(host: str, port: int) -> socket.socket:
    """Listens on loopback if the host is, else on all addresses.

    Without SO_REUSEPORT, so that a second job does not share the port.
    """
    if is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
        )
    return socket.create_server(("", port), backlog=BACKLOG)


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def _shaking_hands(end: socket.socket) -> Iterator[multiprocessing.connection.Connection]:
    """The socket as a connection whose messages have a time limit within the block."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = multiprocessing.connection.Connection(os.dup(end.fileno()))
    with end:  # its options are those of the duplicate, too
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
