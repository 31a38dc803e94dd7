"""Listens for HTTP on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

KEEP_ALIVE_S = 75  # of an idle connection
MAX_CONNECTIONS = 2048
MAX_HEADER_BYTES = 2**16


class _Uvicorn(uvicorn.Server):
    """Its owner handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """Closes a connection on which no request begins in time; uvicorn waits after one byte."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._await_request()  # first: the next one may have come already
        super().on_response_complete()

    def _await_request(self) -> None:
        def end(last: Any) -> None:
            if self.cycle is last:
                self.transport.close()

        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(KEEP_ALIVE_S, end, self.cycle)


class HttpServer:
    """Answers HTTP requests until it is closed. Bound to one event loop.

    Attributes:
      port: that it listens on.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, *, certificate: str = "", key: str = ""):
        host = "127.0.0.1" if host == "localhost" else host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        # Connections inherit it; asyncio sets it only on sockets with an explicit protocol. Without
        # it, the second write of an answer waits 40 ms for the client's acknowledgement.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http=_Protocol,
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            ssl_certfile=certificate or None,
            ssl_keyfile=key or None,
        )
        self._server = _Uvicorn(config)
        self._task = asyncio.create_task(self._server.serve([self._socket]))

    async def close(self, grace_s: float) -> None:
        """Takes no new request, and ends those that still run after `grace_s`."""
        self._server.should_exit = True
        done, _ = await asyncio.wait([self._task], timeout=grace_s)
        if not done:
            self._server.force_exit = True
            await asyncio.wait([self._task], timeout=1.0)
            self._task.cancel()
        self._socket.close()
