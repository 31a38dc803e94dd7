"""A replica behind a server, inside this process, for tests and measurements."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from semrl_jax.rollout.client.local import run_loop
from semrl_jax.rollout.engines.base import Engine
from semrl_jax.rollout.server import RolloutServer, serve
from semrl_jax.rollout.wire.auth import new_token


class EmbeddedReplica(contextlib.AbstractContextManager):
    """A rollout server on an event loop in a daemon thread of this process.

    It listens on a free loopback port, so the client calls it as any other replica. `close` also
    closes the engine.

    Args:
      token: None makes a random one.
      settings: further arguments of `serve`, which may raise.
    """

    def __init__(self, engine: Engine, *, token: str | None = None, **settings: str | float | int):
        self.token = new_token() if token is None else token
        self._loop = _acquire_loop()
        try:
            serving = serve(engine, token=self.token, **settings)
            self._server: RolloutServer | None = self._run(serving)
        except BaseException:
            _release_loop()
            raise
        self.address = self._server.address

    def close(self, grace_s: float = 1.0) -> None:
        """Cancels calls that still run after `grace_s`, and closes the engine."""
        if self._server is None:
            return
        server, self._server = self._server, None
        try:
            self._run(server.close(grace_s))
        finally:
            _release_loop()

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


# grpc.aio needs all servers of a process on one event loop. The first replica starts the loop, and
# the last one that closes ends it.
_lock = threading.Lock()
_num_users = 0
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def _acquire_loop() -> asyncio.AbstractEventLoop:
    global _loop, _num_users, _thread
    with _lock:
        if _num_users == 0:
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(
                target=run_loop, args=(_loop,), name="rollout-server", daemon=True
            )
            _thread.start()
        _num_users += 1
        return _loop


def _release_loop() -> None:
    global _loop, _num_users, _thread
    with _lock:
        _num_users -= 1
        if _num_users > 0:
            return
        _loop.call_soon_threadsafe(_loop.stop)
        _thread.join()
        _loop = _thread = None
