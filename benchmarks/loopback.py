"""How fast bytes move on this machine: memory, loopback sockets, and gRPC with nothing on top.

    python -m benchmarks.loopback

`copy` copies memory that was used before. `socket` and `gRPC` transfer from one process to another
in blocks of 1 MiB that are sent again and again and dropped when they arrive. gRPC has an asyncio
server and a synchronous client, as a replica and a trainer, and messages that are bytes.
"""

import argparse
import asyncio
import contextlib
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import grpc
import numpy as np

BLOCK_BYTES = 1 << 20
_OPTIONS = (("grpc.max_receive_message_length", 2 * BLOCK_BYTES),)


def copy_timer(num_bytes: int) -> Callable[[], float]:
    """A function that returns the seconds of one copy."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)

    def measure() -> float:
        started = time.perf_counter()
        target[:] = source
        return time.perf_counter() - started

    return measure


class Peer(contextlib.AbstractContextManager):
    """Another process to transfer bytes to and from."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.loopback", "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        socket_port, grpc_port = map(int, self._process.stdout.readline().split())
        self._address = "127.0.0.1", socket_port
        self._channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}", _OPTIONS)

    def __exit__(self, *exc_info) -> None:
        self._channel.close()
        self._process.stdin.close()
        self._process.wait()

    def socket_s(self, num_bytes: int) -> float:
        """Seconds of sending this many bytes over a socket."""
        block = memoryview(bytes(BLOCK_BYTES))
        with socket.create_connection(self._address) as connection:
            started = time.perf_counter()
            for start in range(0, num_bytes, BLOCK_BYTES):
                connection.sendall(block[: num_bytes - start])
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
            return time.perf_counter() - started

    def grpc_send_s(self, num_bytes: int) -> float:
        """Seconds of one call that sends this many bytes to the server."""
        block = bytes(BLOCK_BYTES)
        blocks = (block[: num_bytes - start] for start in range(0, num_bytes, BLOCK_BYTES))
        started = time.perf_counter()
        self._channel.stream_unary("/loopback/Send")(blocks, timeout=60)
        return time.perf_counter() - started

    def grpc_receive_s(self, num_bytes: int) -> float:
        """Seconds of one call in which the server sends this many bytes."""
        started = time.perf_counter()
        call = self._channel.unary_stream("/loopback/Receive")
        received = sum(map(len, call(str(num_bytes).encode(), timeout=60)))
        assert received == num_bytes
        return time.perf_counter() - started


async def _serve() -> None:
    def drain_sockets(listening) -> None:
        block = bytearray(BLOCK_BYTES)
        while True:
            connection, _ = listening.accept()
            with connection:
                while connection.recv_into(block):
                    pass
                connection.sendall(b"x")

    async def take(messages, context) -> bytes:
        async for _ in messages:
            pass
        return b""

    async def give(request: bytes, context) -> None:
        block, num_bytes = bytes(BLOCK_BYTES), int(request)
        for start in range(0, num_bytes, BLOCK_BYTES):
            await context.write(block[: num_bytes - start])

    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=drain_sockets, args=(listening,), daemon=True).start()
    server = grpc.aio.server(options=_OPTIONS)
    handlers = {
        "Send": grpc.stream_unary_rpc_method_handler(take),
        "Receive": grpc.unary_stream_rpc_method_handler(give),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("loopback", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(listening.getsockname()[1], port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1000, help="of a transfer; default: 1000")
    parser.add_argument("--repeats", type=int, default=5, help="default: 5")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(_serve())
        return
    from benchmarks import machine

    num_bytes = arguments.megabytes * 10**6
    copy = copy_timer(num_bytes)
    with Peer() as peer:
        ways = {
            "copy": lambda n: copy(),
            "socket": peer.socket_s,
            "gRPC to the server": peer.grpc_send_s,
            "gRPC from the server": peer.grpc_receive_s,
        }
        for name, way in ways.items():
            seconds = statistics.median(way(num_bytes) for _ in range(arguments.repeats))
            print(f"{name:<22}{num_bytes / seconds / 1e9:8.2f} GB/s")
    print(machine.description())


if __name__ == "__main__":
    main()
