"""Bounds of messages, held against their bytes before protobuf parses them.

An empty message has two bytes on the wire and a hundred or more once parsed. So how often a field
comes, and how long it is, is read off the bytes first; that takes no memory and ends at the bound.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError, Message

from semrl_jax.rollout.wire import codec
from semrl_jax.rollout.wire.codec import LimitExceeded
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.types import ReplicaDescription, TensorSpec

MAX_SMALL_BYTES = 4096  # of a message without a payload
_MAX_DESCRIPTION_BYTES = 1 << 20
_MAX_PARAMS_BYTES = 1 << 16  # version, sampling, hidden_states and metrics of a call, each
_MAX_CHUNK_BYTES = codec.CHUNK_BYTES + MAX_SMALL_BYTES
_MAX_OTHERS = 32  # fields without a bound of their own in a message, those of later releases too
_SLACK = 16  # entries above what is sound, so that the codec can say which is too much
_VARINT_BYTES = 10  # the longest


class Bounds:
    """How much a message may hold.

    Args:
      kind: of the message.
      num_bytes: of the whole message.
      fields: for each field that can make a message expensive, how often it may come, and the
        bytes of each or its own Bounds.
    """

    def __init__(
        self, kind: type[Message], num_bytes: int, **fields: tuple[int, int | Bounds]
    ) -> None:
        self.kind = kind
        self.num_bytes = num_bytes
        known = kind.DESCRIPTOR.fields_by_name
        self._fields = {known[name].number: (name, *bound) for name, bound in fields.items()}

    def parse(self, data: bytes) -> Message:
        """The message.

        Raises:
          LimitExceeded: it is larger, or holds more, than the bounds.
          ValueError: the bytes are no such message.
        """
        collections.deque(self.split(data), maxlen=0)
        return parse(self.kind, data)

    def split(
        self, data: bytes, start: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yields (field number, first byte, first byte of the content, end) of each field.

        Raises as `parse`, on reaching the field that is too much.
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
            else:  # groups, which proto3 does not have
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
    """Parses what is known to be small enough; raises ValueError where it is no such message."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise _malformed(kind.DESCRIPTOR.name) from None


class Reader(NamedTuple):
    """Turns the bytes of a request into what the method takes.

    Attributes:
      read: raises LimitExceeded, or another ValueError, with a text for the sender.
      is_long: it may take longer than the event loop can wait.
    """

    read: Callable[[bytes], object]
    is_long: bool = False


def small_reader(read: Callable[[bytes], object]) -> Reader:
    """Of requests of other services, which carry a name at most."""

    def read_small(data: bytes):
        _check_size("the request", len(data), MAX_SMALL_BYTES)
        try:
            return read(data)
        except DecodeError:
            raise _malformed("request") from None

    return Reader(read_small)


def request_readers(limits: ReplicaDescription, specs: Sequence[TensorSpec]) -> dict[str, Reader]:
    """The reader of every method, by its name.

    Args:
      limits: of a Generate call.
      specs: tensors that a weight update carries.
    """
    empty = {"Describe": pb.DescribeRequest, "Pause": pb.PauseRequest}
    empty |= {"Resume": pb.ResumeRequest, "Abort": pb.AbortRequest}
    readers = {name: Reader(Bounds(kind, MAX_SMALL_BYTES).parse) for name, kind in empty.items()}
    num_tensors = 2 * len(specs) + _SLACK  # names that are missing and extra are told apart
    max_spec_bytes = 1024 + _utf8_bytes(max((len(s.name) for s in specs), default=0))
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
    return readers | {"UpdateWeights": Reader(update.parse), "Generate": _generate_reader(limits)}


def _generate_reader(limits: ReplicaDescription) -> Reader:
    max_prompt_bytes = _VARINT_BYTES * (limits.max_prompt_tokens + _SLACK)
    max_sample_bytes = _utf8_bytes(codec.MAX_NAME_LENGTH) + 256
    num_entries = limits.max_prompts + _SLACK
    bounds = Bounds(
        pb.GenerateRequest,
        min(
            codec.MAX_REQUEST_BYTES,
            4 * _MAX_PARAMS_BYTES + num_entries * (max_prompt_bytes + max_sample_bytes),
        ),
        version=(1, _MAX_PARAMS_BYTES),
        sampling=(1, _MAX_PARAMS_BYTES),
        hidden_states=(1, _MAX_PARAMS_BYTES),
        metrics=(1, _MAX_PARAMS_BYTES),
        prompts=(num_entries, max_prompt_bytes),
        samples=(num_entries, max_sample_bytes),
    )
    prompts_number = pb.GenerateRequest.DESCRIPTOR.fields_by_name["prompts"].number

    def read(data: bytes) -> codec.GenerateCall:
        # Prompts are nearly all of a large request. One is parsed at a time: parsed tokens take
        # eight times their bytes, and nothing else runs in this process during one parse.
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
    """Those of a request, each parsed when its turn comes."""

    def __init__(self, data: bytes, places: Sequence[tuple[int, int]]):
        self._data, self._places = data, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> pb.Prompt:
        start, end = self._places[index]
        return parse(pb.Prompt, self._data[start:end])


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


def parse_generate_reply(data: bytes) -> pb.GenerateResponse:
    """Raises ValueError where a replica sent more than it may, or no such message."""
    return _REPLY.parse(data)


def parse_reply(kind: type[Message], data: bytes) -> Message:
    """A reply without a stream; raises as `parse_generate_reply`."""
    _check_size(kind.DESCRIPTOR.name, len(data), _MAX_DESCRIPTION_BYTES)
    return parse(kind, data)


def _utf8_bytes(num_characters: int) -> int:
    return 4 * num_characters


def _varint(data: bytes, position: int, end: int, name: str) -> tuple[int, int]:
    """The number that begins at `position`, and where it ends."""
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
