"""Limits on the size of messages, checked on the bytes before protobuf parses them.

An empty inner message has two bytes on the wire and a hundred or more after parsing. Therefore the
fields are first counted in the bytes, which takes no memory.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError, Message

from semrl_jax.rollout.wire import codec
from semrl_jax.rollout.wire.codec import LimitExceeded
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.types import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    ReplicaDescription,
    TensorSpec,
)

MAX_SMALL_BYTES = 4096  # of a message that carries no arrays or prompts
_MAX_DESCRIPTION_BYTES = 1 << 20
_MAX_PARAMS_BYTES = 1 << 16  # each of a call's version, sampling, hidden_states and metrics
_MAX_CHUNK_BYTES = codec.CHUNK_BYTES + MAX_SMALL_BYTES
_MAX_OTHERS = 32  # all other fields of a message together, those of later releases included
_SLACK = 16  # entries allowed above the true limit, so that the codec can name the surplus one
_VARINT_BYTES = 10  # longest varint
_UTF8_BYTES = 4  # longest character


class Bounds:
    """The limits of one kind of message.

    Args:
      kind: the message class.
      num_bytes: limit of the whole message.
      fields: for each expensive field, how often it may occur, and its limit: a number of bytes, or
        Bounds if it is a message.
    """

    def __init__(
        self, kind: type[Message], num_bytes: int, **fields: tuple[int, int | Bounds]
    ) -> None:
        self.kind = kind
        self.num_bytes = num_bytes
        known = kind.DESCRIPTOR.fields_by_name
        self._fields = {known[name].number: (name, *bound) for name, bound in fields.items()}

    def parse(self, data: bytes) -> Message:
        """Parses a message that is within the bounds.

        Raises:
          LimitExceeded: the message exceeds a limit.
          ValueError: the bytes are not a message of this kind.
        """
        collections.deque(self.split(data), maxlen=0)
        return parse(self.kind, data)

    def split(
        self, data: bytes, start: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yields (number, start of the field, start of its content, end) of each field.

        Positions count bytes. Raises as `parse`, at the first field beyond its limit.
        """
        end = len(data) if end is None else end
        name = self.kind.DESCRIPTOR.name
        _check_size(name, end - start, self.num_bytes)
        counts: collections.Counter[int] = collections.Counter()
        position = start
        while position < end:
            first = position
            tag, position = _varint(data, position, end, name)
            number, content = tag >> 3, position
            wire_type = tag & 7
            if wire_type == 0:
                _, position = _varint(data, position, end, name)
            elif wire_type == 2:
                size, content = _varint(data, position, end, name)
                position = content + size
            elif wire_type in (1, 5):
                position += 8 if wire_type == 1 else 4
            else:  # groups, which proto3 has not
                raise _malformed(name)
            if position > end:
                raise _malformed(name)
            field, count, inner = self._fields.get(number, ("other fields", _MAX_OTHERS, None))
            number_or_other = number if inner is not None else 0
            counts[number_or_other] += 1
            if counts[number_or_other] > count:
                raise LimitExceeded(f"{name}.{field}: more than {count} came; no more are taken.")
            if isinstance(inner, Bounds):
                collections.deque(inner.split(data, content, position), maxlen=0)
            elif inner is not None:
                _check_size(f"{name}.{field}", position - content, inner)
            yield number, first, content, position


def parse(kind: type[Message], data: bytes) -> Message:
    """Parses without limits; raises ValueError if the bytes are not a message of this kind."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise _malformed(kind.DESCRIPTOR.name) from None


class Reader(NamedTuple):
    """Parses and checks the requests of one method.

    Attributes:
      read: turns bytes into the method's argument. Raises LimitExceeded, or another ValueError,
        with a message for the sender.
      is_long: `read` may take long and should run in a thread.
    """

    read: Callable[[bytes], object]
    is_long: bool = False


def small_reader(read: Callable[[bytes], object]) -> Reader:
    """The reader for health checks and reflection, whose requests carry a name at most."""

    def read_small(data: bytes):
        _check_size("the request", len(data), MAX_SMALL_BYTES)
        try:
            return read(data)
        except DecodeError:
            raise _malformed("request") from None

    return Reader(read_small)


def request_readers(limits: ReplicaDescription, specs: Sequence[TensorSpec]) -> dict[str, Reader]:
    """The reader of every method by name, for these limits of a call and tensors of an update."""
    empty = {"Describe": pb.DescribeRequest, "Pause": pb.PauseRequest}
    empty |= {"Resume": pb.ResumeRequest, "Abort": pb.AbortRequest}
    readers = {name: Reader(Bounds(kind, MAX_SMALL_BYTES).parse) for name, kind in empty.items()}
    num_tensors = 2 * len(specs) + _SLACK  # enough to name missing and extra tensors
    max_name_bytes = _UTF8_BYTES * max((len(spec.name) for spec in specs), default=0)
    max_spec_bytes = 1024 + max_name_bytes
    begin = Bounds(
        pb.BeginUpdate,
        _MAX_PARAMS_BYTES + num_tensors * max_spec_bytes,
        tensors=(num_tensors, max_spec_bytes),
    )
    commit = Bounds(
        pb.CommitUpdate, _MAX_PARAMS_BYTES + num_tensors * 64, checksums=(num_tensors, 64)
    )
    update = Bounds(
        pb.UpdateWeightsRequest,
        _MAX_CHUNK_BYTES + begin.num_bytes + commit.num_bytes,
        begin=(1, begin),
        chunk=(1, _MAX_CHUNK_BYTES),
        commit=(1, commit),
    )

    def read(data: bytes) -> codec.WeightMessage:
        chunk = _chunk_of(update, _TENSOR_CHUNK, data)
        if chunk is not None:
            return codec.WeightMessage("chunk", chunk)
        message = update.parse(data)
        kind = message.WhichOneof("payload")
        payload = getattr(message, kind) if kind else None
        if kind == "chunk":
            payload = codec.Chunk(payload.data, payload.tensor_index)
        return codec.WeightMessage(kind, payload)

    return readers | {"UpdateWeights": Reader(read), "Generate": _generate_reader(limits)}


def _generate_reader(limits: ReplicaDescription) -> Reader:
    max_prompt_bytes = _VARINT_BYTES * (limits.max_prompt_tokens + _SLACK)
    max_sample_bytes = _UTF8_BYTES * codec.MAX_NAME_LENGTH + 256
    num_entries = limits.max_prompts + _SLACK
    sampling = Bounds(
        pb.SamplingParams,
        _MAX_PARAMS_BYTES,
        eos_token_ids=(codec.MAX_END_TOKENS + _SLACK, _MAX_PARAMS_BYTES),
        stop_token_ids=(codec.MAX_END_TOKENS + _SLACK, _MAX_PARAMS_BYTES),
        stop_strings=(MAX_STOP_STRINGS + _SLACK, _UTF8_BYTES * (MAX_STOP_CHARACTERS + _SLACK)),
    )
    bounds = Bounds(
        pb.GenerateRequest,
        min(
            codec.MAX_REQUEST_BYTES,
            4 * _MAX_PARAMS_BYTES + num_entries * (max_prompt_bytes + max_sample_bytes),
        ),
        version=(1, _MAX_PARAMS_BYTES),
        sampling=(1, sampling),
        hidden_states=(1, _MAX_PARAMS_BYTES),
        metrics=(1, _MAX_PARAMS_BYTES),
        prompts=(num_entries, max_prompt_bytes),
        samples=(num_entries, max_sample_bytes),
    )
    prompts_number = pb.GenerateRequest.DESCRIPTOR.fields_by_name["prompts"].number

    def read(data: bytes) -> codec.GenerateCall:
        # Prompts are parsed one by one: parsed tokens take eight times their bytes, and nothing
        # else runs in this process while protobuf parses.
        rest, places = [], []
        for number, first, content, end in bounds.split(data):
            if number == prompts_number:
                places.append((content, end))
            else:
                rest.append(data[first:end])
        message = parse(pb.GenerateRequest, b"".join(rest))
        return codec.decode_request(message, limits, _Prompts(data, places))

    return Reader(read, is_long=True)


class _Prompts(Sequence):
    """The prompts of a request, each parsed on access."""

    def __init__(self, data: bytes, places: Sequence[tuple[int, int]]):
        self._data, self._places = data, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> pb.Prompt:
        start, end = self._places[index]
        return parse(pb.Prompt, self._data[start:end])


_TENSOR_CHUNK = Bounds(pb.TensorChunk, _MAX_CHUNK_BYTES)
_STATE_CHUNK = Bounds(pb.StateChunk, _MAX_CHUNK_BYTES)
_STATES = Bounds(pb.Array, codec.MAX_RESPONSE_BYTES, shape=(1, 64))
_REPLY = Bounds(
    pb.GenerateResponse,
    codec.MAX_RESPONSE_BYTES,
    response=(
        1,
        Bounds(
            pb.Response,
            codec.MAX_RESPONSE_BYTES,
            token_ids=(1, codec.MAX_RESPONSE_BYTES),
            versions=(codec.MAX_ENTRIES, MAX_SMALL_BYTES),
            layers=(1, _MAX_PARAMS_BYTES),
            hidden_states=(1, _STATES),
            prompt_states=(1, _STATES),
            metrics=(codec.MAX_ENTRIES, MAX_SMALL_BYTES),
        ),
    ),
    state_chunk=(1, _MAX_CHUNK_BYTES),
)


def parse_generate_reply(data: bytes) -> pb.GenerateResponse | codec.Chunk:
    """Raises ValueError if the reply exceeds a limit or is malformed."""
    chunk = _chunk_of(_REPLY, _STATE_CHUNK, data)
    return _REPLY.parse(data) if chunk is None else chunk


def _chunk_of(bounds: Bounds, inner: Bounds, data: bytes) -> codec.Chunk | None:
    """The chunk in field 2 of a message that has nothing else; None if the message is another.

    Protobuf would copy the data twice. It reads what another program wrote in another order.
    """
    if data[:1] != b"\x12":  # field 2, a message
        return None
    (_, _, start, end), *others = bounds.split(data)
    if others:
        return None
    view = memoryview(data)
    rest, content = [], None
    for number, first, begin, stop in inner.split(data, start, end):
        if number == 2 and data[first] == 0x12 and content is None:
            content = view[begin:stop]
        else:
            rest.append(view[first:stop])
    if content is None:
        return None
    message = parse(inner.kind, b"".join(rest))
    if message.data:
        return None
    if inner.kind is pb.StateChunk:
        return codec.Chunk(content, sample_id=message.sample_id)
    return codec.Chunk(content, tensor_index=message.tensor_index)


def parse_reply(kind: type[Message], data: bytes) -> Message:
    """Parses the reply of any other method; raises as `parse_generate_reply`."""
    _check_size(kind.DESCRIPTOR.name, len(data), _MAX_DESCRIPTION_BYTES)
    return parse(kind, data)


def _varint(data: bytes, position: int, end: int, name: str) -> tuple[int, int]:
    """The varint at `position`, and the position after it."""
    value = shift = 0
    while position < end and shift < 7 * _VARINT_BYTES:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    raise _malformed(name)


def _check_size(name: str, num_bytes: int, limit: int) -> None:
    if num_bytes > limit:
        raise LimitExceeded(f"{name} has {num_bytes} bytes; at most {limit} are taken.")


def _malformed(name: str) -> ValueError:
    return ValueError(f"the bytes are no {name} message.")
