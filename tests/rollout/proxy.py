"""A TCP proxy that cuts, delays, throttles and corrupts what passes through it."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time

_BLOCK = 1 << 14  # bytes read at once


@dataclasses.dataclass
class Faults:
    """What happens in one direction; may be changed while connections are open."""

    cut_after: int | None = None  # bytes, then both sides are closed; the next connection lives
    flip_at: int | None = None  # one bit of the byte at this position is inverted, once
    bytes_per_s: float | None = None  # limit of the speed
    delay_s: float = 0.0  # of every block
    stopped: threading.Event = dataclasses.field(default_factory=threading.Event)  # nothing passes
    num_bytes: int = 0  # since the last reset, over all connections
    num_faults: int = 0  # cuts and flips so far

    def apply(self, data: bytes) -> tuple[bytes, bool]:
        """The bytes to pass on, and whether the connection is then cut."""
        first, self.num_bytes = self.num_bytes, self.num_bytes + len(data)
        if self.flip_at is not None and first <= self.flip_at < self.num_bytes:
            changed = bytearray(data)
            changed[self.flip_at - first] ^= 1
            data, self.flip_at = bytes(changed), None
            self.num_faults += 1
        if self.cut_after is not None and self.num_bytes >= self.cut_after:
            data, self.cut_after = data[: max(self.cut_after - first, 0)], None
            self.num_faults += 1
            return data, True
        return data, False


class Proxy(contextlib.AbstractContextManager):
    """Listens on a free loopback port and passes connections on to `address`."""

    def __init__(self, address: str):
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self.up, self.down = Faults(), Faults()  # from the client to the server, and back
        self.num_connections = 0  # so far
        self._closed = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __exit__(self, *exc_info) -> None:
        self._closed.set()
        _close(self._listener, *self._sockets)

    def cut(self) -> None:
        """Cuts all open connections now."""
        _close(*self._sockets)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # when the listener is closed
            while True:
                client, _ = self._listener.accept()
                self.num_connections += 1
                try:
                    server = socket.create_connection(self._target, 5.0)
                    server.settimeout(None)
                except OSError:
                    client.close()
                    continue
                self._sockets |= {client, server}
                for pair in ((client, server, self.up), (server, client, self.down)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, faults: Faults) -> None:
        with contextlib.suppress(OSError):  # when either side is closed
            while data := source.recv(_BLOCK):
                while faults.stopped.is_set() and not self._closed.is_set():
                    time.sleep(0.01)
                data, is_cut = faults.apply(data)
                pause_s = faults.delay_s
                if faults.bytes_per_s:
                    pause_s += len(data) / faults.bytes_per_s
                if pause_s:
                    time.sleep(pause_s)
                target.sendall(data)
                if is_cut:
                    break
        _close(source, target)


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
