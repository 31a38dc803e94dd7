"""Listens for HTTP on the event loop of the rollout server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from semrl_jax.rollout.http.app import make_app
from semrl_jax.rollout.http.texts import Texts
from semrl_jax.rollout.server.server import Http
from semrl_jax.rollout.server.service import RolloutService

KEEP_ALIVE_S = 75  # of an idle connection
MAX_CONNECTIONS = 2048
MAX_HEADER_BYTES = 2**16


class _Uvicorn(uvicorn.Server):
    """The rollout server handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Answers HTTP requests until it is closed. Bound to one event loop."""

    def __init__(
        self,
        service: RolloutService,
        http: Http,
        *,
        token: str,
        stall_timeout_s: float,
        certificate: str = "",
        key: str = "",
    ):
        host = "127.0.0.1" if http.host == "localhost" else http.host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server(
            (host, http.port), family=family, backlog=MAX_CONNECTIONS
        )
        config = uvicorn.Config(
            make_app(
                service,
                Texts(http.tokenizer, http.end_token_ids),
                token=token,
                model=http.model,
                stall_timeout_s=stall_timeout_s,
            ),
            log_config=None,
            access_log=False,
            lifespan="off",
            http="h11",
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
