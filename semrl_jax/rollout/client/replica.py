"""One replica as its client sees it: a channel, calls with deadlines, and what became of it."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Iterable

import grpc
from google.protobuf.message import Message

from semrl_jax.errors import UserError
from semrl_jax.rollout.wire import bounds, codec
from semrl_jax.rollout.wire.auth import is_loopback, token_metadata
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.types import (
    HiddenStateParams,
    ReplicaDescription,
    SamplingParams,
    WeightVersion,
)

_OPTIONS = (
    ("grpc.max_send_message_length", codec.MAX_REQUEST_BYTES),
    ("grpc.max_receive_message_length", codec.MAX_RESPONSE_BYTES),
    ("grpc.enable_http_proxy", 0),  # a proxy of the environment would see the token
    ("grpc.keepalive_time_ms", 20_000),  # finds a machine that went away without a word
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)

_SERVICE = pb.DESCRIPTOR.services_by_name["RolloutService"].full_name
_MAX_BACKOFF_S = 30.0
_MAX_CALL_S = 0.95 * codec.MAX_CALL_S  # gRPC rounds it up
_MAX_DETAILS = 2000  # characters of a replica's status
_CLOSE_S = 5.0  # for gRPC to end the calls of a channel


class Replica:
    """A connection to one address.

    Attributes:
      address: host:port.
      description: what it said last.
      version: the weights it is known to serve; None sends it no Generate call.
      error: why it was set aside, "" if it was not.
      retry_at: `time.monotonic()` before which it is left alone.
      answered: kinds of calls that it has sent a response of; another kind may be compiled first.
    """

    def __init__(self, address: str, token: str, *, tls_ca: bytes | None):
        self.address = address
        self.description: ReplicaDescription | None = None
        self.version: WeightVersion | None = None
        self.error = ""
        self.retry_at = 0.0
        self.answered: set[tuple[SamplingParams, HiddenStateParams]] = set()
        self._num_failures = 0  # in a row
        self._metadata = token_metadata(token)
        if tls_ca is not None:
            credentials = grpc.ssl_channel_credentials(tls_ca)
            self._channel = grpc.secure_channel(address, credentials, _OPTIONS)
        elif is_loopback(address.rpartition(":")[0]):
            self._channel = grpc.insecure_channel(address, _OPTIONS)
        else:
            raise UserError(
                f"rollout.addresses: {address!r} is not loopback, so the token would travel in the "
                "clear; set rollout.tls_ca_file to the PEM file of the replica's certificate "
                "authority."
            )
        # Replies stay bytes until their bounds are checked.
        self._generate = self._channel.unary_stream(
            f"/{_SERVICE}/Generate", request_serializer=pb.GenerateRequest.SerializeToString
        )
        # Takes serialised messages: one update goes to several replicas.
        self._update_weights = self._channel.stream_unary(f"/{_SERVICE}/UpdateWeights")

    @property
    def name(self) -> str:
        return f"rollout replica {self.address}"

    def describe(self, timeout_s: float) -> ReplicaDescription:
        """Raises UserError where the reply is none that a replica may send."""
        reply = self._control("Describe", pb.DescribeResponse, timeout_s)
        try:
            self.description = codec.decode_description(reply)
        except ValueError as error:
            raise UserError(f"{self.name} describes itself wrongly: {error}") from error
        return self.description

    def pause(self, timeout_s: float) -> None:
        self._control("Pause", pb.PauseResponse, timeout_s)

    def resume(self, timeout_s: float) -> None:
        self._control("Resume", pb.ResumeResponse, timeout_s)

    def abort(self, timeout_s: float) -> int:
        return self._control("Abort", pb.AbortResponse, timeout_s).num_aborted

    def generate(self, request: pb.GenerateRequest, timeout_s: float):
        """The stream of replies, for `bounds.parse_generate_reply`; iterate and `cancel` it."""
        return self._begin(self._generate, request, timeout_s)

    def update_weights(self, messages: Iterable[bytes], timeout_s: float) -> grpc.Future:
        """Begins to send serialised UpdateWeightsRequest messages; the reply is bytes, too."""
        return self._begin(self._update_weights.future, messages, timeout_s)

    def set_aside(self, error: str, *, wait_s: float = 0.0) -> None:
        """Leaves the replica alone for a while that doubles with every failure in a row."""
        self.error = error
        backoff_s = min(0.5 * 2**self._num_failures, _MAX_BACKOFF_S)
        self.retry_at = time.monotonic() + max(backoff_s, wait_s)
        self._num_failures += 1

    def succeeded(self) -> None:
        self.error, self.retry_at, self._num_failures = "", 0.0, 0

    def close(self) -> None:
        """Ends all calls."""
        # A signal's exception inside gRPC may have left one of its locks held: do not wait for it.
        closing = threading.Thread(target=self._channel.close, name="close", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _control(self, name: str, kind: type[Message], timeout_s: float) -> Message:
        """The reply to a request that holds nothing."""
        data = self._call(self._channel.unary_unary(f"/{_SERVICE}/{name}"), b"", timeout_s)
        try:
            return bounds.parse_reply(kind, data)
        except ValueError as error:
            raise UserError(
                f"{self.name} sent an unreadable reply to {name}: {error} Correct "
                "rollout.addresses, or start the replica from this release."
            ) from error

    def _begin(self, method, request, timeout_s: float):
        """A call that goes on beside its caller.

        It is begun in a thread, where no signal raises: gRPC counts a call before it makes the
        thread that serves it, and would never close the channel of one left between the two.
        """
        begun: concurrent.futures.Future = concurrent.futures.Future()

        def begin() -> None:
            try:
                begun.set_result(self._call(method, request, timeout_s))
            except BaseException as error:
                begun.set_exception(error)

        threading.Thread(target=begin, name=f"begin {self.address}", daemon=True).start()
        return begun.result()

    def _call(self, method, request, timeout_s: float):
        timeout_s = min(max(timeout_s, 0.001), _MAX_CALL_S)
        return method(request, timeout=timeout_s, metadata=self._metadata)


_FATAL = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}
_ALL_PLACES_TAKEN = "Concurrent RPC limit exceeded!"  # gRPC's own words


def fatal_error(replica: Replica, error: grpc.RpcError) -> Exception | None:
    """The exception for a failure that no retry can mend, None for one that it might."""
    code, details = error.code(), _one_line(error)
    if details == _ALL_PLACES_TAKEN:  # the code is that of a call which is too large
        return None
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return UserError(
            f"{replica.name} refuses the token; give trainer and replica the same one, by "
            "$SEMRL_ROLLOUT_TOKEN or rollout.token_file."
        )
    if code == grpc.StatusCode.PERMISSION_DENIED:
        return UserError(f"{replica.name}: {details}")
    if code == grpc.StatusCode.OUT_OF_RANGE:  # of the trainer's own numbers
        return RuntimeError(f"{replica.name} refuses the weights: {details}")
    if code in _FATAL:
        return ValueError(f"{replica.name} refuses the call: {details}")
    return None


def describe_error(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {_one_line(error)}"


def _one_line(error: grpc.RpcError) -> str:
    return " ".join((error.details() or "").split())[:_MAX_DETAILS]
