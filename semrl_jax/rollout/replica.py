"""One replica as its client sees it: a channel, calls with deadlines, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Iterable

import grpc

from semrl_jax.errors import UserError
from semrl_jax.rollout import codec
from semrl_jax.rollout.auth import is_loopback, token_metadata
from semrl_jax.rollout.proto import rollout_pb2 as pb
from semrl_jax.rollout.proto import rollout_pb2_grpc
from semrl_jax.types import ReplicaDescription, WeightVersion

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


class Replica:
    """A connection to one address.

    Attributes:
      address: host:port.
      description: what it said last.
      version: the weights it is known to serve; None sends it no Generate call.
      error: why it was set aside, "" if it was not.
      retry_at: `time.monotonic()` before which it is left alone.
    """

    def __init__(self, address: str, token: str, *, tls_ca: bytes | None):
        self.address = address
        self.description: ReplicaDescription | None = None
        self.version: WeightVersion | None = None
        self.error = ""
        self.retry_at = 0.0
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
                "clear; set tls_ca to the PEM file of the replica's certificate authority."
            )
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        # Takes serialised messages: one update goes to several replicas.
        self._update_weights = self._channel.stream_unary(
            f"/{_SERVICE}/UpdateWeights",
            response_deserializer=pb.UpdateWeightsResponse.FromString,
        )

    @property
    def name(self) -> str:
        return f"rollout replica {self.address}"

    def describe(self, timeout_s: float) -> ReplicaDescription:
        reply = self._call(self._stub.Describe, pb.DescribeRequest(), timeout_s)
        self.description = codec.decode_description(reply)
        return self.description

    def pause(self, timeout_s: float) -> None:
        self._call(self._stub.Pause, pb.PauseRequest(), timeout_s)

    def resume(self, timeout_s: float) -> None:
        self._call(self._stub.Resume, pb.ResumeRequest(), timeout_s)

    def abort(self, timeout_s: float) -> int:
        return self._call(self._stub.Abort, pb.AbortRequest(), timeout_s).num_aborted

    def generate(self, request: pb.GenerateRequest, timeout_s: float):
        """The stream of replies; iterate and `cancel` it."""
        return self._call(self._stub.Generate, request, timeout_s)

    def update_weights(self, messages: Iterable[bytes], timeout_s: float) -> grpc.Future:
        """Begins to send serialised UpdateWeightsRequest messages."""
        return self._call(self._update_weights.future, messages, timeout_s)

    def set_aside(self, error: str, *, wait_s: float = 0.0) -> None:
        """Leaves the replica alone for a while that doubles with every failure in a row."""
        self.error = error
        backoff_s = min(0.5 * 2**self._num_failures, _MAX_BACKOFF_S)
        self.retry_at = time.monotonic() + max(backoff_s, wait_s)
        self._num_failures += 1

    def succeeded(self) -> None:
        self.error, self.retry_at, self._num_failures = "", 0.0, 0

    def close(self) -> None:
        self._channel.close()

    def _call(self, method, request, timeout_s: float):
        return method(request, timeout=max(timeout_s, 0.001), metadata=self._metadata)


_FATAL = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}


def fatal_error(replica: Replica, error: grpc.RpcError) -> Exception | None:
    """The exception for a failure that no retry can mend, None for one that it might."""
    code, details = error.code(), error.details()
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return UserError(
            f"{replica.name} refuses the token; give trainer and replica the same one."
        )
    if code == grpc.StatusCode.PERMISSION_DENIED:
        return UserError(f"{replica.name}: {details}")
    if code in _FATAL:
        return ValueError(f"{replica.name} refuses the call: {details}")
    return None


def describe_error(error: grpc.RpcError) -> str:
    details = " ".join((error.details() or "").split())
    return f"{error.code().name}: {details}"
