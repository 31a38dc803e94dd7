"""The connection to one replica: a channel, calls with deadlines, and whether it failed."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import grpc

from semrl_jax.addresses import split_address
from semrl_jax.errors import UserError
from semrl_jax.rollout.wire import bounds, codec
from semrl_jax.rollout.wire.auth import is_loopback, token_metadata
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.types import HiddenStateParams, ReplicaDescription, SamplingParams, WeightVersion

_log = logging.getLogger(__name__)

_OPTIONS = (
    ("grpc.max_send_message_length", codec.MAX_REQUEST_BYTES),
    ("grpc.max_receive_message_length", codec.MAX_RESPONSE_BYTES),
    ("grpc.enable_http_proxy", 0),  # a proxy from the environment would see the token
    ("grpc.keepalive_time_ms", 20_000),  # detects a machine that is gone
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    # An attempt to connect has at least this time; one that is refused is repeated earlier.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)

_SERVICE = pb.DESCRIPTOR.services_by_name["RolloutService"].full_name
_MAX_BACKOFF_S = 30.0
_MAX_CALL_S = 0.95 * codec.MAX_CALL_S  # gRPC rounds deadlines up
_MAX_PROGRAM = 100  # characters kept of the program that a replica compiles
_MAX_DETAILS = 2000  # characters kept of a status message
_CLOSE_S = 5.0  # longest wait for gRPC to end the calls of a channel
_MAX_CALLS_AT_ONCE = 8  # whatever a replica says: its server admits 64 calls, of all clients


@dataclasses.dataclass(frozen=True)
class Waits:
    """Timeouts of a client, and its reports.

    Attributes:
      connect_timeout_s: until all replicas have answered.
      sync_timeout_s: of one `sync_weights`, retries included.
      sync_wait_s: after one replica has confirmed the weights, the others have this long. A replica
        may also make the others wait this long for the next bytes.
      generate_timeout_s: of one `generate`, retries included.
      stall_timeout_s: a replica that sends nothing for this long loses its call. It must exceed the
        time to the first response of a batch, compilation included.
      progress_every_s: interval between two lines about the same wait.
      progress: takes one line; the default logs it as a warning.
    """

    connect_timeout_s: float = 300.0
    sync_timeout_s: float = 1800.0
    sync_wait_s: float = 60.0
    generate_timeout_s: float = 7200.0
    stall_timeout_s: float = 600.0
    progress_every_s: float = 10.0
    progress: Callable[[str], None] = _log.warning


class Figures(NamedTuple):
    """What a replica has done for this client.

    Attributes:
      responses, tokens: received, those included that came twice.
      busy_s: seconds in which it had at least one call.
      failures: times that it was set aside.
    """

    responses: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    failures: int = 0


class Counters:
    """Counts by name; several threads may add to them."""

    def __init__(self):
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)


class Load:
    """Counts what a replica does; several threads may use it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._figures = Figures()
        self._num_calls = 0
        self._busy_since = 0.0

    @property
    def figures(self) -> Figures:
        """The totals so far, those of running calls included."""
        with self._lock:
            found = self._figures
            if self._num_calls:
                found = found._replace(busy_s=found.busy_s + time.monotonic() - self._busy_since)
            return found

    @property
    def is_busy(self) -> bool:
        return self._num_calls > 0

    @property
    def num_calls(self) -> int:
        """Running now."""
        return self._num_calls

    def begin(self) -> None:
        with self._lock:
            if not self._num_calls:
                self._busy_since = time.monotonic()
            self._num_calls += 1

    def end(self) -> None:
        with self._lock:
            self._num_calls -= 1
            if not self._num_calls:
                self._count(busy_s=time.monotonic() - self._busy_since)

    def add(self, num_tokens: int) -> None:
        """Counts a response."""
        with self._lock:
            self._count(responses=1, tokens=num_tokens)

    def fail(self) -> None:
        with self._lock:
            self._count(failures=1)

    def _count(self, **more: int | float) -> None:
        changed = {name: getattr(self._figures, name) + value for name, value in more.items()}
        self._figures = self._figures._replace(**changed)


class Replica:
    """The connection to one replica, and its state.

    Attributes:
      address: host:port.
      description: its last answer to Describe.
      version: the weights it serves. None if unknown; it then gets no Generate call.
      error: why the replica was set aside; "" if it is in use.
      retry_at: the `time.monotonic()` before which it gets no call.
      failed_at: the `time.monotonic()` at which it was last set aside.
      answers: whether the last question for its description was answered.
      is_leaving: it gets no further call.
      heard_at: the `time.monotonic()` of its last message while it had more calls than it runs at
        once. The others wait their turn.
      answered: kinds of calls it has sent a response to. The first response of another kind may
        have to wait for compilation.
      load: counts its calls; `Load` of its own unless one is given.
    """

    def __init__(self, address: str, token: str, *, tls_ca: bytes | None, load: Load | None = None):
        # gRPC takes port 65537 for port 1, and sends the token there.
        host, _ = split_address(address, "rollout.addresses")
        self.address = address
        self.description: ReplicaDescription | None = None
        self.version: WeightVersion | None = None
        self.error = ""
        self.retry_at = self.failed_at = self.heard_at = 0.0
        self.answers = True
        self.is_leaving = False
        self.load = load or Load()
        self.answered: set[tuple[SamplingParams, HiddenStateParams]] = set()
        self._num_failures = 0  # in a row
        self._metadata = token_metadata(token)
        if tls_ca is not None:
            credentials = grpc.ssl_channel_credentials(tls_ca)
            self._channel = grpc.secure_channel(address, credentials, _OPTIONS)
        elif is_loopback(host):
            self._channel = grpc.insecure_channel(address, _OPTIONS)
        else:
            raise UserError(
                f"rollout.addresses: {address!r} is not loopback, so the token would travel in the "
                "clear; set rollout.tls_ca_file to the PEM file of the replica's certificate "
                "authority."
            )
        # Replies stay bytes until their bounds are checked.
        self._describe = self._channel.unary_unary(f"/{_SERVICE}/Describe")
        self._generate = self._channel.unary_stream(
            f"/{_SERVICE}/Generate", request_serializer=pb.GenerateRequest.SerializeToString
        )
        # Takes serialised messages: one update goes to several replicas.
        self._update_weights = self._channel.stream_unary(f"/{_SERVICE}/UpdateWeights")

    @property
    def name(self) -> str:
        return f"rollout replica {self.address}"

    @property
    def is_deterministic(self) -> bool:
        return self.description is not None and self.description.is_deterministic

    @property
    def calls_at_once(self) -> int:
        """Generate calls that it gets at a time; one if it does not say."""
        told = self.description.calls_at_once if self.description else 0
        return min(max(told, 1), _MAX_CALLS_AT_ONCE)

    def describe(
        self, timeout_s: float, memory: pb.SharedMemory | None = None
    ) -> ReplicaDescription:
        """Raises UserError if the reply is invalid, grpc.RpcError if there is none.

        `memory` is the client's; the description says whether the replica can read it.
        """
        self.description = self._ask(timeout_s, memory)
        return self.description

    def compiling(self, timeout_s: float) -> str:
        """What it compiles now, and for how long; "" if it compiles nothing or does not answer."""
        try:
            text = self._ask(timeout_s, None).compiling
        except (grpc.RpcError, UserError):
            return ""
        return "".join(filter(str.isprintable, text[:_MAX_PROGRAM]))

    def _ask(self, timeout_s: float, memory: pb.SharedMemory | None) -> ReplicaDescription:
        request = pb.DescribeRequest(memory=memory).SerializeToString()
        data = self._call(self._describe, request, timeout_s)
        try:
            reply = bounds.parse_reply(pb.DescribeResponse, data)
        except ValueError as error:
            raise UserError(
                f"{self.name} sent an unreadable reply to Describe: {error} Correct "
                "rollout.addresses, or start the replica from this release."
            ) from error
        try:
            return codec.decode_description(reply)
        except ValueError as error:
            raise UserError(f"{self.name} describes itself wrongly: {error}") from error

    def generate(self, request: pb.GenerateRequest, timeout_s: float):
        """The stream of serialised replies, for `bounds.parse_generate_reply`."""
        return self._start(self._generate, request, timeout_s)

    def update_weights(self, messages: Iterable[bytes], timeout_s: float) -> grpc.Future:
        """Starts sending serialised UpdateWeightsRequest messages; the reply is bytes."""
        return self._start(self._update_weights.future, messages, timeout_s)

    def set_aside(self, error: str, *, wait_s: float = 0.0) -> None:
        """Starts a pause without calls; it doubles with each consecutive failure."""
        self.error = error
        self.load.fail()
        self.failed_at = time.monotonic()
        backoff_s = min(0.5 * 2**self._num_failures, _MAX_BACKOFF_S)
        self.retry_at = self.failed_at + max(backoff_s, wait_s)
        self._num_failures += 1

    def succeeded(self) -> None:
        self.error, self.retry_at, self._num_failures = "", 0.0, 0

    def close(self) -> None:
        """Ends all calls."""
        # If a signal handler raised inside gRPC, a lock may be held for ever: limit the wait.
        closing = threading.Thread(target=self._channel.close, name="close", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _start(self, method, request, timeout_s: float):
        """Starts a call that runs concurrently with its caller.

        Signal handlers raise in the main thread only, so the call is started in another thread:
        gRPC counts a call before it creates the thread that serves it, and an exception between the
        two would keep the channel from ever closing.
        """
        started: concurrent.futures.Future = concurrent.futures.Future()

        def start() -> None:
            try:
                started.set_result(self._call(method, request, timeout_s))
            except BaseException as error:
                started.set_exception(error)

        threading.Thread(target=start, name=f"start {self.address}", daemon=True).start()
        return started.result()

    def _call(self, method, request, timeout_s: float):
        timeout_s = min(max(timeout_s, 0.001), _MAX_CALL_S)
        return method(request, timeout=timeout_s, metadata=self._metadata)


_FATAL = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}
_TOO_MANY_CALLS = "Concurrent RPC limit exceeded!"  # gRPC's own text


def fatal_error(replica: Replica, error: grpc.RpcError) -> Exception | None:
    """The exception to raise for a permanent failure; None if a retry may succeed."""
    code, details = error.code(), _one_line(error)
    # This code is also that of a message that is too large, which is permanent.
    if details == _TOO_MANY_CALLS:
        return None
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return UserError(
            f"{replica.name} refuses the token; give trainer and replica the same one, by "
            "$SEMRL_ROLLOUT_TOKEN or rollout.token_file."
        )
    if code == grpc.StatusCode.PERMISSION_DENIED:
        return UserError(f"{replica.name}: {details}")
    if code == grpc.StatusCode.OUT_OF_RANGE:  # weights that are not finite
        return RuntimeError(f"{replica.name} refuses the weights: {details}")
    if code in _FATAL:
        return ValueError(f"{replica.name} refuses the call: {details}")
    return None


# What to do about a failed connection, by a part of gRPC's message; the first that fits.
_WAYS_OUT = {
    "certificate has expired": (
        "its certificate has expired: start it with one that `python -m launch.rollout "
        "--make_certs` makes anew"
    ),
    "certificate is not yet valid": "correct the clocks of trainer and replica",
    "hostname verification": (
        "its certificate is for other names: correct rollout.addresses, or start it with a "
        "certificate for this name (`python -m launch.rollout --make_certs --host=NAME`)"
    ),
    "certificate_verify_failed": (
        "its certificate is not of the authority in rollout.tls_ca_file: correct that, or start "
        "the replica with a certificate of this authority"
    ),
    "wrong_version_number": (
        "it has no TLS: give the replica --tls_certificate and --tls_key, or leave "
        "rollout.tls_ca_file empty"
    ),
    # A replica with TLS closes a connection without it. Other causes are possible.
    "socket closed": (
        "if it has TLS, set rollout.tls_ca_file to its certificate's authority; else start it "
        "again, or raise rollout.connect_timeout_s"
    ),
    "handshake": (
        "give the replica --tls_certificate and --tls_key and the trainer that certificate's "
        "authority as rollout.tls_ca_file, or use none of them"
    ),
}


def way_out(reason: str) -> str:
    """What the user can do about a connection that failed, by `describe_error`."""
    found = (text for sign, text in _WAYS_OUT.items() if sign in reason.lower())
    start = "start it with `python -m launch.rollout`, correct rollout.addresses"
    return next(found, f"{start}, or raise rollout.connect_timeout_s")


def describe_error(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {_one_line(error)}"


def _one_line(error: grpc.RpcError) -> str:
    return " ".join((error.details() or "").split())[:_MAX_DETAILS]
