"""Reads messages: a limit on their bytes, then protobuf, then the checks of the codec.

gRPC limits all messages of a connection. A method may admit less: an empty inner message has two
bytes on the wire and 64 after parsing, so parsing takes up to 32 times the bytes (measured).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError, Message

from semrl_jax.rollout.wire import codec
from semrl_jax.rollout.wire.codec import LimitExceeded
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.types import ReplicaDescription, TensorSpec

_SMALL_BYTES = 4096  # limit of a message that carries no arrays or prompts
_FIRST_FIELD = {pb.TensorChunk: 1 << 3, pb.StateChunk: 1 << 3 | 2}  # tags: tensor_index, sample_id


class Reader(NamedTuple):
    """Parses and checks the requests of one method."""

    # Turns bytes into the method's argument. Raises DecodeError, or a ValueError with a message for
    # the sender.
    parse: Callable[[bytes], object]
    num_bytes: int = _SMALL_BYTES  # limit of a request
    # `read` may take seconds and much memory: it should run in a thread, one at a time.
    is_long: bool = False

    def read(self, data: bytes) -> object:
        """Raises LimitExceeded, or another ValueError with a message for the sender."""
        if len(data) > self.num_bytes:
            raise LimitExceeded(
                f"the request has {len(data)} bytes; at most {self.num_bytes} are taken."
            )
        try:
            return _parsed("request", self.parse, data)
        except ValueError as error:
            # The traceback holds the parsed message, until Python next collects cycles.
            raise error.with_traceback(None) from None


def request_readers(limits: ReplicaDescription, specs: Sequence[TensorSpec]) -> dict[str, Reader]:
    """The reader of every method by name, for these limits of a call and tensors of an update."""
    small = {"Describe": pb.DescribeRequest, "Pause": pb.PauseRequest}
    small |= {"Resume": pb.ResumeRequest, "Abort": pb.AbortRequest}
    small |= {"TensorSums": pb.TensorSumsRequest, "Sleep": pb.SleepRequest}
    small |= {"HandOver": pb.HandOverRequest}
    readers = {name: Reader(kind.FromString) for name, kind in small.items()}

    # Twice the tensors, so that the codec can name missing and extra ones.
    max_name_bytes = 4 * max((len(spec.name) for spec in specs), default=0)  # UTF-8
    update_bytes = codec.CHUNK_BYTES + (1 << 16) + 2 * len(specs) * (1024 + max_name_bytes)
    readers["UpdateWeights"] = Reader(_weight_message, update_bytes)

    def generate(data: bytes) -> codec.GenerateCall:
        return codec.decode_request(pb.GenerateRequest.FromString(data), limits)

    readers["Generate"] = Reader(generate, codec.MAX_REQUEST_BYTES, is_long=True)
    return readers


def _weight_message(data: bytes) -> codec.WeightMessage:
    chunk = _chunk_of(pb.TensorChunk, data)
    if chunk is not None:
        return codec.WeightMessage("chunk", chunk)
    message = pb.UpdateWeightsRequest.FromString(data)
    kind = message.WhichOneof("payload")
    payload = getattr(message, kind) if kind else None
    if kind == "chunk":
        payload = codec.Chunk(payload.data, payload.tensor_index)
    return codec.WeightMessage(kind, payload)


def parse_generate_reply(data: bytes) -> pb.GenerateResponse | codec.Chunk:
    """Raises ValueError if the bytes are no reply."""
    chunk = _parsed("GenerateResponse", lambda data: _chunk_of(pb.StateChunk, data), data)
    return parse(pb.GenerateResponse, data) if chunk is None else chunk


def parse(kind: type[Message], data: bytes) -> Message:
    """Raises ValueError if the bytes are not a message of this kind."""
    return _parsed(kind.DESCRIPTOR.name, kind.FromString, data)


def _parsed(name: str, function: Callable[[bytes], object], data: bytes):
    try:
        return function(data)
    except DecodeError:
        raise ValueError(f"the bytes are no {name} message.") from None


def _chunk_of(kind: type[Message], data: bytes) -> codec.Chunk | None:
    """The chunk in a message as the codec writes it; None if the message has another form.

    The chunk's data stay a part of the message. Protobuf copies them twice, which takes 1.1 ms per
    MiB; the checksum takes 0.03.
    """
    try:
        size, start = _varint(data, 1)
        end = start
        if data[start] == _FIRST_FIELD[kind]:
            value, end = _varint(data, start + 1)
            end += value if kind is pb.StateChunk else 0
        data_size, data_start = _varint(data, end + 1)
        is_chunk = data[0] == data[end] == codec.FIELD_2[0]
    except IndexError:
        return None
    if not is_chunk or not start + size == data_start + data_size == len(data):
        return None
    others = kind.FromString(data[start:end])
    content = memoryview(data)[data_start:]
    if kind is pb.StateChunk:
        return codec.Chunk(content, sample_id=others.sample_id)
    return codec.Chunk(content, tensor_index=others.tensor_index)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The varint of at most 35 bits at `position`, and the position after it; or IndexError."""
    value = 0
    for i in range(5):
        byte = data[position + i]
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, position + i + 1
    raise IndexError
