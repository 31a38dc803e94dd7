"""Serves a rollout service on an address, with token, TLS, health checks and reflection."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from semrl_jax.rollout.engines.base import Engine, EngineDeadError
from semrl_jax.rollout.server.request_checks import Guard
from semrl_jax.rollout.server.service import RolloutService
from semrl_jax.rollout.wire import codec
from semrl_jax.rollout.wire.auth import TokenInterceptor, check_key, read_certificates, read_file
from semrl_jax.support.addresses import is_loopback
from semrl_jax.support.errors import UserError
from semrl_jax.types import WeightVersion

_log = logging.getLogger(__name__)

_CALLS_END_S = 2.0  # longest wait for calls that a stopped server has cancelled
_CHECK_S = 1.0  # between two checks that the engine lives
KEEPALIVE_S = 20  # between probes of an idle connection; the client's interval must not be shorter

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second server on the same port is an error
    ("grpc.max_receive_message_length", codec.MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", codec.MAX_RESPONSE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_S * 1000),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 1000 // 2),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_S * 1000 // 2),
)


class Http(NamedTuple):
    """What is served over HTTP, with the same token and TLS files.

    Attributes:
      host: address to bind; any other than loopback needs the TLS files.
      model: the name of the policy in requests and answers.
    """

    port: int
    host: str
    tokenizer: Any
    end_token_ids: Sequence[int]
    model: str


@dataclasses.dataclass(eq=False)
class RolloutServer:
    """A service that listens on an address. Made by `serve`; bound to one event loop."""

    address: str  # host:port
    _engine: Engine
    _service: RolloutService
    _server: grpc.aio.Server
    _health: health.aio.HealthServicer
    _http: Any  # HttpServer, whose packages are loaded only where HTTP is served; or None

    def __post_init__(self):
        self._watch = asyncio.create_task(self._watch_engine())

    async def wait(self) -> None:
        """Waits until the engine has died, then raises EngineDeadError."""
        await self._service.dead.wait()
        raise EngineDeadError(f"the engine behind {self.address} is dead.")

    async def load(self, version: WeightVersion, tensors) -> WeightVersion:
        """Serves weights that this process reads; see `RolloutService.load`."""
        return await self._service.load(version, tensors)

    async def close(self, grace_s: float = 1.0) -> None:
        """Refuses new calls, cancels calls that still run after `grace_s`, closes the engine."""
        self._watch.cancel()
        await self._health.enter_graceful_shutdown()
        both = [self._server.stop(grace_s)]
        if self._http is not None:
            both.append(self._http.close(grace_s))
        await asyncio.gather(*both)
        self._engine.close()

    async def _watch_engine(self) -> None:
        """Reports NOT_SERVING once the engine has died, in a call or without one."""
        dead = self._service.dead
        while not dead.is_set():
            try:
                self._engine.check()
            except EngineDeadError as error:
                _log.error("the engine is dead: %s", error)
                dead.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(dead.wait(), _CHECK_S)
        for name in ("", codec.SERVICE_NAME):
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)


async def serve(
    engine: Engine,
    *,
    token: str,
    host: str = "127.0.0.1",
    port: int = 0,
    tls_certificate: str = "",
    tls_key: str = "",
    replica_id: str = "",
    stall_timeout_s: float = 600.0,
    max_calls: int = 64,
    http: Http | None = None,
) -> RolloutServer:
    """Starts a server around an engine, which it closes, on the running event loop.

    Args:
      host: address to bind; any address other than loopback needs TLS.
      port: 0 takes a free port.
      tls_certificate, tls_key: PEM files, both or neither.
      replica_id: "" makes a unique one.
      stall_timeout_s: see `RolloutService`.
      max_calls: limit on concurrent calls; further calls are refused.
      http: what is served over HTTP; None: nothing, and nothing is loaded for it.

    UserError: the token, address, port or a TLS file cannot be used.
    """
    interceptor = TokenInterceptor(token)
    places = (http.port, http.host) if http else ()
    check_place(host, port, tls_certificate, tls_key, *places)
    credentials = _credentials(host, tls_certificate, tls_key)
    host = _plain(host)
    replica_id = replica_id or f"{socket.gethostname()}:{port}:{secrets.token_hex(4)}"
    service = RolloutService(engine, replica_id=replica_id, stall_timeout_s=stall_timeout_s)
    await engine.start()
    health_servicer = health.aio.HealthServicer()
    server = grpc.aio.server(
        interceptors=(interceptor, Guard(service.request_readers(), service.dead.set)),
        options=_OPTIONS,
        maximum_concurrent_rpcs=max_calls,
    )
    server.add_generic_rpc_handlers((_handlers(service),))
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (codec.SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    target = f"[{host}]" if ":" in host else host
    try:
        if credentials is None:
            bound = server.add_insecure_port(f"{target}:{port}")
        else:
            bound = server.add_secure_port(f"{target}:{port}", credentials)
    except RuntimeError as error:
        raise UserError(f"cannot listen on {target}:{port}: {error}") from error
    await server.start()
    for name in ("", codec.SERVICE_NAME):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    http_server = None
    if http is not None:
        from semrl_jax.rollout.http.app import make_app
        from semrl_jax.rollout.http.server import HttpServer
        from semrl_jax.rollout.http.texts import Texts

        texts = Texts(http.tokenizer, http.end_token_ids)
        options = {"token": token, "model": http.model, "stall_timeout_s": stall_timeout_s}
        tls = {} if is_loopback(http.host) else {"certificate": tls_certificate, "key": tls_key}
        app = make_app(service, texts, **options)
        http_server = HttpServer(app, http.host, http.port, **tls)
    return RolloutServer(f"{target}:{bound}", engine, service, server, health_servicer, http_server)


def serve_until_signal(
    engine: Engine,
    *,
    announce: Callable[[str], None] = print,
    feed: Callable[[RolloutServer, Callable[[], None]], Awaitable[None]] | None = None,
    grace_s: float = 5.0,
    **settings,
) -> None:
    """Serves in this process until SIGTERM or SIGINT; `announce` takes a line with the address.

    `feed` gives the server its weights, as long as it runs, and calls its second argument once it
    has some; None: a trainer gives them. Running calls may continue for `grace_s` after the signal.
    `settings` are further arguments of `serve`, which closes the engine and may raise.
    EngineDeadError: the engine died; a supervisor should start the process again.
    """

    async def run() -> None:
        server = await serve(engine, **settings)
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)

        def ready() -> None:
            announce(f"rollout replica listens on {server.address}")

        async def fed() -> None:
            await feed(server, ready)
            await stopped.wait()

        if feed is None:
            ready()

        works = [server.wait(), stopped.wait(), *([fed()] if feed else ())]
        tasks = [asyncio.create_task(work) for work in works]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await server.close(grace_s)
        # gRPC prints a traceback for every call that the end of the loop cancels.
        if rest := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(rest, timeout=_CALLS_END_S)
        for task in done:
            task.result()

    asyncio.run(run())


def check_place(
    host: str,
    port: int,
    tls_certificate: str = "",
    tls_key: str = "",
    http_port: int = 0,
    http_host: str = "127.0.0.1",
) -> None:
    """Raises UserError if `serve` would refuse these settings. Needs no engine."""
    _credentials(host, tls_certificate, tls_key)
    _check_port("port", _plain(host), port)
    if http_port:
        if not tls_certificate and not is_loopback(http_host):
            raise UserError(
                f"http_host={http_host!r} is not loopback and needs TLS: set tls_certificate and "
                "tls_key to PEM files, or take 127.0.0.1."
            )
        _check_port("http_port", _plain(http_host), http_port)


def _handlers(service: RolloutService) -> grpc.GenericRpcHandler:
    """The service's methods; `Guard` parses their requests and serialises their replies."""
    handlers = {
        "Describe": grpc.unary_unary_rpc_method_handler(service.Describe),
        "Generate": grpc.unary_stream_rpc_method_handler(service.Generate),
        "UpdateWeights": grpc.stream_unary_rpc_method_handler(service.UpdateWeights),
        "Pause": grpc.unary_unary_rpc_method_handler(service.Pause),
        "Resume": grpc.unary_unary_rpc_method_handler(service.Resume),
        "Abort": grpc.unary_unary_rpc_method_handler(service.Abort),
        "TensorSums": grpc.unary_unary_rpc_method_handler(service.TensorSums),
        "Sleep": grpc.unary_unary_rpc_method_handler(service.Sleep),
        "HandOver": grpc.unary_unary_rpc_method_handler(service.HandOver),
    }
    return grpc.method_handlers_generic_handler(codec.SERVICE_NAME, handlers)


def _plain(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host.strip("[]")


def _credentials(host: str, tls_certificate: str, tls_key: str) -> grpc.ServerCredentials | None:
    if bool(tls_certificate) != bool(tls_key):
        raise UserError(
            f"tls_certificate={tls_certificate!r} and tls_key={tls_key!r} must be set together."
        )
    if not tls_certificate:
        if is_loopback(host):
            return None
        raise UserError(
            f"host={host!r} is not loopback and needs TLS: set tls_certificate and tls_key to PEM "
            "files, or bind 127.0.0.1."
        )
    key = read_file("tls_key", tls_key)
    certificates = read_certificates("tls_certificate", tls_certificate)
    check_key(tls_certificate, tls_key)
    return grpc.ssl_server_credentials([(key, certificates)])


def _check_port(name: str, host: str, port: int) -> None:
    """Binds the port and releases it, because gRPC's own error gives no reason."""
    if not 0 <= port < 65_536:
        raise UserError(f"{name}={port} must be in [0, 65535]; 0 takes a free one.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"cannot listen on {host}:{port}: {error.strerror or error}. Choose another "
                f"{name}, or 0 for {'any free one' if name == 'port' else 'none'}."
            ) from error
