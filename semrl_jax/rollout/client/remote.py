"""The connection to a replica behind a server: a channel, and calls with deadlines."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping

import grpc

from semrl_jax.rollout.client.replica import ADDRESSES, Load, Replica, Responses
from semrl_jax.rollout.wire import bounds, codec
from semrl_jax.rollout.wire.auth import token_metadata
from semrl_jax.rollout.wire.codec import GenerateCall, RolloutDecoder
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.support.addresses import is_loopback, split_address
from semrl_jax.support.errors import UserError
from semrl_jax.types import ReplicaDescription, Rollout, TensorSum

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

_MAX_CALL_S = 0.95 * codec.MAX_CALL_S  # gRPC rounds deadlines up
_MAX_TEXT = 100  # characters kept of a text that is shown
_SHARED_BYTES = 1 << 17  # of a call without its requests: ids and texts that end a response
_HAND_OVER_S = 2.0  # longest wait for a replica to say that it is handed over
_CLOSE_S = 5.0  # longest wait for gRPC to end the calls of a channel


class RemoteReplica(Replica):
    """A replica that is called over gRPC."""

    max_call_bytes = codec.MAX_REQUEST_BYTES - _SHARED_BYTES

    def __init__(
        self,
        address: str,
        token: str,
        *,
        tls_ca: bytes | None,
        load: Load | None = None,
        field: str = ADDRESSES,
    ):
        # gRPC takes port 65537 for port 1, and sends the token there.
        host, _ = split_address(address, field)
        super().__init__(address, load, field)
        self._metadata = token_metadata(token)
        if tls_ca is not None:
            credentials = grpc.ssl_channel_credentials(tls_ca)
            self._channel = grpc.secure_channel(address, credentials, _OPTIONS)
        elif is_loopback(host):
            self._channel = grpc.insecure_channel(address, _OPTIONS)
        else:
            raise UserError(
                f"{field}: {address!r} is not loopback, so the token would travel in the "
                "clear; set rollout.tls_ca_file to the PEM file of the certificate authority."
            )
        # Replies stay bytes, so that what is no message gets our error, and chunks are not copied.
        self._describe = self._channel.unary_unary(f"/{codec.SERVICE_NAME}/Describe")
        self._generate = self._channel.unary_stream(
            f"/{codec.SERVICE_NAME}/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
        )
        self._tensor_sums = self._channel.unary_unary(f"/{codec.SERVICE_NAME}/TensorSums")
        self._sleep = self._channel.unary_unary(f"/{codec.SERVICE_NAME}/Sleep")
        self._hand_over = self._channel.unary_unary(f"/{codec.SERVICE_NAME}/HandOver")
        # Takes serialised messages: one update goes to several replicas.
        self._update_weights = self._channel.stream_unary(f"/{codec.SERVICE_NAME}/UpdateWeights")

    def describe(
        self, timeout_s: float, memory: pb.SharedMemory | None = None
    ) -> ReplicaDescription:
        self.description = self._ask(timeout_s, memory)
        return self.description

    def compiling(self, timeout_s: float) -> str:
        try:
            text = self._ask(timeout_s, None).compiling
        except (grpc.RpcError, UserError):
            return ""
        return printable(text)

    def _ask(self, timeout_s: float, memory: pb.SharedMemory | None) -> ReplicaDescription:
        request = pb.DescribeRequest(memory=memory).SerializeToString()
        data = self._call(self._describe, request, timeout_s)
        try:
            reply = bounds.parse(pb.DescribeResponse, data)
        except ValueError as error:
            raise UserError(
                f"{self.name} sent an unreadable reply to Describe: {error} Correct "
                f"{self.field}, or start the replica from this release."
            ) from error
        try:
            return codec.decode_description(reply)
        except ValueError as error:
            raise UserError(f"{self.name} describes itself wrongly: {error}") from error

    def generate(self, call: GenerateCall, timeout_s: float) -> RemoteResponses:
        messages = self._start(self._generate, codec.encode_request(call), timeout_s)
        described = self.description
        return RemoteResponses(
            messages,
            RolloutDecoder(
                call,
                vocab_size=described.vocab_size,
                replica_id=described.replica_id,
                routed_experts=described.routed_experts,
            ),
        )

    def tensor_sums(self, timeout_s: float) -> list[TensorSum]:
        request = pb.TensorSumsRequest().SerializeToString()
        data = self._call(self._tensor_sums, request, timeout_s)
        return codec.decode_sums(bounds.parse(pb.TensorSumsResponse, data))

    def sleep(self, run_id: str, timeout_s: float) -> str:
        """Frees its memory until weights come; returns why it freed nothing, or ""."""
        request = pb.SleepRequest(run_id=run_id).SerializeToString()
        remark = bounds.parse(pb.SleepResponse, self._call(self._sleep, request, timeout_s)).remark
        return printable(remark)

    def update_weights(self, messages: Iterable[bytes], timeout_s: float) -> grpc.Future:
        """Starts sending serialised UpdateWeightsRequest messages; the reply is bytes."""
        return self._start(self._update_weights.future, messages, timeout_s)

    def close(self, run_id: str = "", attempt_id: str = "") -> None:
        def end() -> None:
            # One that does not answer, or is older than this call, still belongs to the run.
            if run_id and self.description and not self.error:
                request = pb.HandOverRequest(run_id=run_id, attempt_id=attempt_id)
                with contextlib.suppress(grpc.RpcError, ValueError):
                    self._call(self._hand_over, request.SerializeToString(), _HAND_OVER_S)
            self._channel.close()

        # If a signal handler raised inside gRPC, a lock may be held for ever: limit the wait.
        closing = threading.Thread(target=end, name="close", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _start(self, method, request, timeout_s: float):
        """Starts a call that runs concurrently with its caller, in a thread.

        Signal handlers raise in the main thread only. gRPC counts a call before it creates the
        thread that serves it; an exception between the two would keep the channel from closing.
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


class RemoteResponses(Responses):
    """The replies to one Generate call as rollouts."""

    def __init__(self, messages, decoder: RolloutDecoder):
        self._messages = messages  # of gRPC, serialised
        self._decoder = decoder

    @property
    def num_bytes(self) -> Mapping[str, int]:
        return self._decoder.num_bytes

    def __iter__(self) -> Iterator[Rollout | None]:
        for message in self._messages:
            yield self._decoder.feed(bounds.parse_generate_reply(message))
        self._decoder.finish()

    def cancel(self) -> None:
        self._messages.cancel()


def printable(text: str) -> str:
    """The beginning of a replica's text, on one line."""
    return "".join(filter(str.isprintable, text[:_MAX_TEXT]))
