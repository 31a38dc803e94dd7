"""NumPy records to protobuf messages and back; sizes are checked before memory is allocated."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import xxhash
from google.protobuf.message import Message
from jaxtyping import Float, Int, Shaped, UInt, UInt8

from semrl_jax.metrics import METHODS, WINDOWS, Measurement, MetricKey
from semrl_jax.metrics.measurements import decode, encode
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.support.intervals import in_words, is_within
from semrl_jax.types import (
    DISTRIBUTION,
    FINISH_REASONS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    TOKEN_ARRAYS,
    Adapter,
    HiddenStateParams,
    MetricParams,
    ReplicaDescription,
    Rollout,
    SampleRequest,
    SamplingParams,
    TensorSpec,
    TensorSum,
    TokenArray,
    VersionSpan,
    WeightVersion,
    experts_dtype,
    manifest_digest,
)

PROTOCOL_MAJOR = 3
PROTOCOL_MINOR = 2
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["RolloutService"].full_name

# Checksum of a tensor's bytes. It finds errors. Whoever can change the bytes on purpose can change
# the checksum too; only TLS stops that. SHA-256 takes over ten times as long, on both sides.
checksum = xxhash.xxh3_128
CHECKSUM_BYTES = 16

CHUNK_BYTES = 1 << 20  # array data per message; measured to be the fastest size on loopback
MAX_REQUEST_BYTES = 64 << 20  # a call of 8192 samples with 1024 prompts of 4096 tokens has 12 MB
MAX_RESPONSE_BYTES = 16 << 20  # per response, without its state chunks
MAX_CALL_S = 24 * 3600.0  # longest deadline of a call
MAX_HIDDEN_WIDTH = 65_536
MAX_NAME_LENGTH = 256
MAX_END_TOKENS = 1024  # eos token ids, and as many stop token ids
MAX_ENTRIES = 4096  # of a list of numbers or names
MAX_QUOTE = 200  # characters quoted from a wrong message
_SPARE_ENTRIES = 16
FIELD_2 = bytes([2 << 3 | 2])  # tag of a chunk in its message, and of the data in the chunk

# The field of each kind of states, in a rollout and in a message; in the order of their chunks.
STATE_FIELDS = {"decode": "hidden_states", "prefill": "prompt_states"}
CHUNKED_FIELDS = (*STATE_FIELDS.values(), "routed_experts")
STATE_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
BYTES_ARRAYS = tuple(array for array in TOKEN_ARRAYS if array.wire)
WEIGHT_DTYPES = {**STATE_DTYPES, "float16": np.dtype(np.float16)}


class LimitExceeded(ValueError):
    """A well-formed request that is larger than the replica admits."""


class NotOffered(ValueError):
    """A well-formed request for what the replica does not have."""


class GenerateCall(NamedTuple):
    """A decoded GenerateRequest."""

    requests: tuple[SampleRequest, ...]
    sampling: SamplingParams
    hidden_states: HiddenStateParams
    version: WeightVersion | None  # None: the weights that are served
    metrics: MetricParams | None = None
    # The replica may keep the caches of these responses. A later call for the same sample ids then
    # continues those with which its prompts begin.
    keep: bool = False
    # In the replica's process: is told the sample id and the new tokens of each response while it
    # is sampled, in any thread; the last ones perhaps late with stop strings.
    on_tokens: Callable[[str, Sequence[int]], None] | None = None
    prompt_logprobs: bool = False  # asked for, in the replica's process
    routed_experts: bool = False  # whether the experts that tokens went to are sent
    entropies: bool = False  # whether the entropies of the distributions are sent


class WeightMessage(NamedTuple):
    """A decoded UpdateWeightsRequest."""

    kind: str | None  # "begin", "chunk" or "commit"; None if there is no payload
    payload: pb.BeginUpdate | Chunk | pb.CommitUpdate | None


class Chunk(NamedTuple):
    """A TensorChunk or StateChunk whose data is still a part of the message's bytes."""

    data: bytes | memoryview
    tensor_index: int = 0
    sample_id: str = ""


def _record(kind: type, message: Message, **others):
    """A record of class `kind` from the fields with the same names; lists become tuples."""
    for name in {field.name for field in dataclasses.fields(kind)} - others.keys():
        value = getattr(message, name)
        if not isinstance(value, int | float | str):
            if len(value) > MAX_ENTRIES:
                raise LimitExceeded(f"{name} has {len(value)} entries; at most {MAX_ENTRIES}.")
            value = tuple(value)
        others[name] = value
    return kind(**others)


def encode_version(version: WeightVersion) -> pb.WeightVersion:
    return pb.WeightVersion(**dataclasses.asdict(version))


def decode_version(message: pb.WeightVersion) -> WeightVersion:
    """Raises ValueError if a field is missing or too long."""
    for field in ("run_id", "attempt_id", "digest"):
        _check_name(f"version.{field}", getattr(message, field))
    if message.step < 0:
        raise ValueError(f"version.step={message.step} must be at least 0.")
    return _record(WeightVersion, message)


def encode_description(description: ReplicaDescription) -> pb.DescribeResponse:
    return pb.DescribeResponse(**dataclasses.asdict(description))


def decode_description(message: pb.DescribeResponse) -> ReplicaDescription:
    experts = message.routed_experts
    if len(experts) not in (0, 3) or min(experts, default=1) < 1:
        raise ValueError(f"routed_experts={list(experts)!r:.100} must be three numbers above 0.")
    version = decode_version(message.version) if message.HasField("version") else None
    return _record(ReplicaDescription, message, version=version)


def encode_specs(specs: Iterable[TensorSpec]) -> list[pb.TensorSpec]:
    return [pb.TensorSpec(name=s.name, shape=s.shape, dtype=s.dtype) for s in specs]


def decode_specs(
    messages: Sequence[pb.TensorSpec | TensorSpec], expected: Sequence[TensorSpec]
) -> tuple[TensorSpec, ...]:
    """The manifest of a weight update: messages, or records of a sender in this process.

    Raises ValueError if tensors are missing, extra, repeated, or of another shape than `expected`,
    or have an unknown dtype.
    """
    if len(messages) > 2 * len(expected) + _SPARE_ENTRIES:  # if slightly more, name them
        raise ValueError(f"{len(messages)} tensors came; the replica's model has {len(expected)}.")
    shapes = {spec.name: spec.shape for spec in expected}
    counts = collections.Counter(message.name for message in messages)
    problems = []
    if missing := [name for name in shapes if name not in counts]:
        problems.append(f"missing: {_some(missing)}")
    if extra := [name for name in counts if name not in shapes]:
        problems.append(f"not of this model: {_some(extra)}")
    if repeated := [name for name, count in counts.items() if count > 1]:
        problems.append(f"repeated: {_some(repeated)}")
    for message in messages:
        shape = shapes.get(message.name)
        if shape is not None and not _is_equal(message.shape, shape):
            problems.append(f"{message.name!r} is {quoted(message.shape)}, not {list(shape)}")
        if message.dtype not in WEIGHT_DTYPES:
            name, dtypes = quoted(message.name), ", ".join(WEIGHT_DTYPES)
            problems.append(f"{name} has dtype {quoted(message.dtype)}, not {dtypes}")
    if problems:
        raise ValueError(f"tensors do not match the replica's model; {_some(problems, '; ')}.")
    return tuple(TensorSpec(m.name, shapes[m.name], m.dtype) for m in messages)


def decode_adapter(message: pb.Adapter, modules: Sequence[str], max_rank: int) -> Adapter:
    """Raises NotOffered if the replica applies no such adapters, ValueError if it is wrong."""
    if not max_rank:
        raise NotOffered("this replica applies no adapters; send merged weights.")
    if not 0 < message.rank <= max_rank:
        raise LimitExceeded(f"adapter.rank={message.rank} must be 1 to {max_rank}.")
    if not message.modules or len(set(message.modules)) < len(message.modules):
        raise ValueError("adapter.modules must name at least one module, each once.")
    if unknown := [name for name in message.modules if name not in modules]:
        raise ValueError(f"adapter.modules: {_some(unknown)} cannot have adapters.")
    return Adapter(message.rank, tuple(message.modules))


def encode_sums(version: WeightVersion, sums: Iterable[TensorSum]) -> pb.TensorSumsResponse:
    found = [pb.TensorSum(**dataclasses.asdict(each)) for each in sums]
    return pb.TensorSumsResponse(version=encode_version(version), sums=found)


def decode_sums(message: pb.TensorSumsResponse) -> list[TensorSum]:
    """Raises ValueError if a name is too long, or a dtype is unknown."""
    for each in message.sums:
        _check_name("sums.name", each.name)
        if each.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"{each.name!r} has dtype {quoted(each.dtype)}.")
    return [_record(TensorSum, each) for each in message.sums]


def encode_request(call: GenerateCall) -> pb.GenerateRequest:
    """Encodes a Generate call; a prompt that several samples share is sent once."""
    message = pb.GenerateRequest(
        version=encode_version(call.version),
        sampling=dataclasses.asdict(call.sampling),
        hidden_states=dataclasses.asdict(call.hidden_states),
        metrics=dataclasses.asdict(call.metrics) if call.metrics else None,
        keep=call.keep,
        routed_experts=call.routed_experts,
        entropies=call.entropies,
    )
    index_of: dict[bytes, int] = {}
    for request in call.requests:
        key = np.ascontiguousarray(request.prompt_ids, np.int32).tobytes()
        if key not in index_of:
            index_of[key] = len(index_of)
            message.prompts.add(token_ids=request.prompt_ids.tolist())
        message.samples.add(
            sample_id=request.sample_id,
            group_id=request.group_id,
            sample_index=request.sample_index,
            seed=request.seed,
            prompt_index=index_of[key],
        )
    return message


def decode_request(message: pb.GenerateRequest, limits: ReplicaDescription) -> GenerateCall:
    """Decodes a request and checks it against the replica's limits.

    Raises LimitExceeded if there are more samples or longer prompts than the replica admits;
    NotOffered if the replica lacks a layer, metric or kind of sampling; ValueError if another part
    of the request is invalid.
    """
    version = decode_version(message.version)
    sampling = _record(SamplingParams, message.sampling)
    hidden_states, metrics = HiddenStateParams(), None
    if message.hidden_states.layers:
        hidden_states = _record(HiddenStateParams, message.hidden_states)
    if message.HasField("metrics"):
        metrics = _record(MetricParams, message.metrics)
    _check_params(sampling, hidden_states, metrics, limits)
    _check_routed(message.routed_experts, limits)
    _check_entropies(message.entropies, limits)
    num_samples, num_prompts = len(message.samples), len(message.prompts)
    check_num_samples(num_samples, limits)
    if num_prompts > num_samples:
        raise ValueError(f"{num_prompts} prompts for {num_samples} samples; send each once.")
    arrays = [_checked_prompt(i, p.token_ids, limits) for i, p in enumerate(message.prompts)]
    requests, seen = [], set()
    for i, sample in enumerate(message.samples):
        _check_name(f"samples[{i}].sample_id", sample.sample_id)
        if sample.sample_id in seen:
            raise ValueError(f"samples[{i}].sample_id={quoted(sample.sample_id)} is not unique.")
        seen.add(sample.sample_id)
        if not 0 <= sample.prompt_index < num_prompts:
            raise ValueError(
                f"samples[{i}].prompt_index={sample.prompt_index} must be in [0, {num_prompts})."
            )
        if sample.sample_index < 0:
            raise ValueError(f"samples[{i}].sample_index={sample.sample_index} must be at least 0.")
        requests.append(_record(SampleRequest, sample, prompt_ids=arrays[sample.prompt_index]))
    return GenerateCall(
        tuple(requests),
        sampling,
        hidden_states,
        version,
        metrics,
        keep=message.keep,
        routed_experts=message.routed_experts,
        entropies=message.entropies,
    )


def check_call(call: GenerateCall, limits: ReplicaDescription) -> None:
    """Checks a call that no message carried; raises as `decode_request`."""
    _check_params(call.sampling, call.hidden_states, call.metrics, limits)
    _check_routed(call.routed_experts, limits)
    _check_entropies(call.entropies, limits)
    check_num_samples(len(call.requests), limits)
    prompts = {id(request.prompt_ids): request.prompt_ids for request in call.requests}
    for i, prompt_ids in enumerate(prompts.values()):
        _checked_prompt(i, prompt_ids, limits)


def check_values(rollout: Rollout) -> None:
    """Raises ValueError if a log-probability or an effective rank is not finite."""
    for array in BYTES_ARRAYS:
        if (values := getattr(rollout, array.name)) is not None:
            _check_finite(f"sample {quoted(rollout.sample_id)}: {array.wire}", values)


def num_bytes(rollout: Rollout) -> collections.Counter[str]:
    """Size of the arrays and metrics of a response: "token_bytes" and "metric_bytes"."""
    found = collections.Counter(token_bytes=rollout.response_ids.nbytes)
    for array in BYTES_ARRAYS:
        if not array.is_left_out(values := getattr(rollout, array.name)):
            found["token_bytes" if array.is_per_token else "metric_bytes"] += values.nbytes
    if rollout.mean_state is not None:
        names = encode(rollout.metrics)
        found["metric_bytes"] += rollout.mean_state.nbytes + sum(map(len, names)) + 4 * len(names)
    return found


def encode_rollout(rollout: Rollout) -> Iterator[pb.GenerateResponse | bytes]:
    """Yields the response, then its states in serialised chunks if they exceed one chunk."""
    # Fields are set in place: a constructor would copy an inner message.
    message = pb.GenerateResponse()
    response = message.response
    response.sample_id = rollout.sample_id
    response.group_id = rollout.group_id
    response.sample_index = rollout.sample_index
    response.token_ids.extend(rollout.response_ids.tolist())
    for array in BYTES_ARRAYS:
        if not array.is_left_out(values := getattr(rollout, array.name)):
            setattr(response, array.wire, values.astype(array.dtype, copy=False).tobytes())
    response.finish_reason = rollout.finish_reason
    for span in rollout.versions:
        response.versions.add(version=encode_version(span.version), start=span.start, end=span.end)
    response.layers.extend(rollout.layers)
    response.metrics.update(encode(rollout.metrics))
    response.generate_s = rollout.generate_s
    if rollout.mean_state is not None:
        response.mean_state = rollout.mean_state.astype("<f4", copy=False).tobytes()
    in_chunks = []
    for field in CHUNKED_FIELDS:
        states = getattr(rollout, field)
        if states is None:
            continue
        array, data = getattr(response, field), as_bytes(states)
        array.dtype = states.dtype.name
        array.shape.extend(states.shape)
        if len(data) <= CHUNK_BYTES:
            array.data = data.tobytes()
        else:
            in_chunks.append(data)
    yield message
    for data in in_chunks:
        for start in range(0, len(data), CHUNK_BYTES):
            others = pb.StateChunk(sample_id=rollout.sample_id)
            yield encode_chunk(others, data[start : start + CHUNK_BYTES])


class RolloutDecoder:
    """Decodes the messages of one Generate stream to rollouts, and checks them against the call.

    `routed_experts`: as in the replica's description.
    """

    def __init__(
        self,
        call: GenerateCall,
        *,
        vocab_size: int,
        replica_id: str = "",
        routed_experts: tuple[int, ...] = (),
    ):
        self._call = call
        self._requests = {request.sample_id: request for request in call.requests}
        self._vocab_size = vocab_size
        self._replica_id = replica_id
        self._routed_experts = routed_experts
        self._version = encode_version(call.version)
        self._open: Rollout | None = None  # waits for its state chunks
        self._unfilled: list[UInt8[np.ndarray, " bytes"]] = []  # its bytes that have not come
        # Received so far: "state_bytes", "token_bytes" and "metric_bytes".
        self.num_bytes: collections.Counter[str] = collections.Counter()

    def feed(self, message: pb.GenerateResponse | Chunk) -> Rollout | None:
        """Returns the rollout that this message completes, or None.

        Its arrays may be read-only views of the message. Raises ValueError if the message
        contradicts itself, the call or the messages before it.
        """
        if isinstance(message, Chunk):
            return self._feed_chunk(message)
        kind = message.WhichOneof("payload")
        if kind == "response":
            return self._feed_response(message.response)
        if kind == "state_chunk":
            return self._feed_chunk(message.state_chunk)
        raise ValueError("a message holds neither a response nor a state chunk.")

    def finish(self) -> None:
        """Raises ValueError if the stream ended inside a response."""
        if self._open is not None:
            raise ValueError(
                f"sample {self._open.sample_id!r} ended {sum(map(len, self._unfilled))} bytes "
                "before the end of its hidden states."
            )

    def _feed_response(self, message: pb.Response) -> Rollout | None:
        self.finish()  # the previous response must be complete
        name = f"sample {quoted(message.sample_id)}"
        request = self._requests.get(message.sample_id)
        if request is None:
            raise ValueError(f"{name} was not asked for.")
        if (message.group_id, message.sample_index) != (request.group_id, request.sample_index):
            raise ValueError(
                f"{name} came back as group {message.group_id}, index {message.sample_index}; "
                f"it was asked for as {request.group_id}, {request.sample_index}."
            )
        if message.finish_reason not in FINISH_REASONS:
            raise ValueError(f"{name}: unknown finish reason {quoted(message.finish_reason)}.")
        num_tokens, max_tokens = len(message.token_ids), self._call.sampling.max_tokens
        is_aborted = message.finish_reason == "aborted"
        if num_tokens > max_tokens or (num_tokens == 0 and not is_aborted):
            raise ValueError(f"{name} has {num_tokens} tokens; 1 to {max_tokens} were asked for.")
        ids = np.array(message.token_ids, np.int32)
        _check_vocabulary(name, ids, self._vocab_size)
        arrays = {
            array.name: _decode_token_array(name, array, message, num_tokens)
            for array in BYTES_ARRAYS
        }
        _check_mask(name, arrays, is_aborted)
        if (arrays["entropies"] is not None) != (self._call.entropies and num_tokens > 0):
            raise ValueError(f"{name}: entropies must come if they are asked for, and only then.")
        self._check_versions(name, message.versions, num_tokens)
        counts = {"decode": num_tokens, "prefill": len(request.prompt_ids)}
        if num_tokens == 0:
            counts["prefill"] = 0  # it may have been aborted in the middle of its prompt
        states = {
            field: self._decode_states(name, message, kind, counts[kind])
            for kind, field in STATE_FIELDS.items()
        }
        if len({array.shape[-1] for array in states.values() if array is not None}) > 1:
            raise ValueError(f"{name}: the states of prompt and response are not equally wide.")
        mean_state = self._decode_mean_state(name, message)
        num_routed = counts["prefill"] + num_tokens - 1 if num_tokens else 0
        states["routed_experts"] = self._decode_experts(name, message, num_routed)
        rollout = Rollout(
            **request.rollout_fields,
            response_ids=ids,
            **arrays,
            finish_reason=message.finish_reason,
            versions=tuple(
                VersionSpan(decode_version(s.version), s.start, s.end) for s in message.versions
            ),
            replica_id=self._replica_id,
            **states,
            layers=tuple(message.layers),
            metrics=decode(message.metrics),
            generate_s=message.generate_s,
            mean_state=mean_state,
        )
        self.num_bytes.update(num_bytes(rollout))
        for field, array in states.items():
            if array is not None and array.nbytes > 0:
                data = getattr(message, field).data
                self.num_bytes["state_bytes"] += len(data)
                if not data:
                    self._unfilled.append(as_bytes(array))
        self._open = rollout if self._unfilled else None
        if not self._unfilled:
            self._check_experts(rollout)
        return None if self._unfilled else rollout

    def _feed_chunk(self, message: pb.StateChunk | Chunk) -> Rollout | None:
        rollout = self._open
        if rollout is None or rollout.sample_id != message.sample_id:
            raise ValueError(
                f"a state chunk of sample {quoted(message.sample_id)} came out of turn."
            )
        data, rest = message.data, self._unfilled[0]
        if not 0 < len(data) <= min(CHUNK_BYTES, len(rest)):
            raise ValueError(
                f"sample {message.sample_id!r}: a chunk of {len(data)} bytes, {len(rest)} bytes "
                f"before the end of its states; a chunk has 1 to {CHUNK_BYTES} bytes of them."
            )
        self.num_bytes["state_bytes"] += len(data)
        rest[: len(data)] = np.frombuffer(data, np.uint8)
        self._unfilled[0] = rest[len(data) :]
        if len(self._unfilled[0]):
            return None
        self._unfilled.pop(0)
        if not self._unfilled:
            self._check_experts(rollout)
        self._open = rollout if self._unfilled else None
        return None if self._unfilled else rollout

    def _check_versions(self, name: str, spans: Sequence[pb.VersionSpan], num_tokens: int) -> None:
        end = 0
        for span in spans:
            if span.version != self._version:
                raise ValueError(
                    f"{name} was sampled with weights {decode_version(span.version)}, "
                    f"not with {self._call.version}."
                )
            if span.start != end or span.end <= span.start:
                raise ValueError(f"{name}: version span [{span.start}, {span.end}) follows {end}.")
            end = span.end
        if end != num_tokens:
            raise ValueError(f"{name}: version spans cover {end} of {num_tokens} tokens.")

    def _decode_states(
        self, name: str, message: pb.Response, kind: str, num_tokens: int
    ) -> Float[np.ndarray, "T L D"] | None:
        """The states if they are in the message; an array to fill if chunks follow."""
        asked, field = self._call.hidden_states, STATE_FIELDS[kind]
        is_asked = bool(asked.layers) and kind in asked.kinds
        if message.HasField(field) != is_asked:
            sent = "sent" if message.HasField(field) else "missing"
            raise ValueError(
                f"{name}: {field} are {sent}; layers={list(asked.layers)}, "
                f"kinds={list(asked.kinds)}."
            )
        if not is_asked:
            return None
        array = getattr(message, field)
        width = array.shape[-1] if array.shape else 0
        shape = (num_tokens, len(asked.layers), width)
        if not _is_equal(array.shape, shape) or not 0 < width <= MAX_HIDDEN_WIDTH:
            raise ValueError(
                f"{name}: {field} of shape {quoted(array.shape)} for {num_tokens} tokens and "
                f"{len(asked.layers)} layers."
            )
        if not _is_equal(message.layers, asked.layers) or array.dtype != asked.dtype:
            raise ValueError(
                f"{name}: {array.dtype[:MAX_QUOTE]} states of layers {quoted(message.layers)}; "
                f"asked for {asked.dtype} of {list(asked.layers)}."
            )
        dtype = STATE_DTYPES[array.dtype]
        if not array.data:
            return np.empty(shape, dtype)
        if len(array.data) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: {len(array.data)} bytes of states for shape {list(shape)}.")
        return np.frombuffer(array.data, dtype).reshape(shape)

    def _decode_experts(
        self, name: str, message: pb.Response, num_tokens: int
    ) -> UInt[np.ndarray, "T M C"] | None:
        """The experts if they are in the message; an array to fill if chunks follow."""
        is_asked = self._call.routed_experts
        if message.HasField("routed_experts") != is_asked:
            sent = "missing" if is_asked else "sent"
            raise ValueError(f"{name}: routed_experts are {sent}.")
        if not is_asked:
            return None
        array, (*of_token, num_experts) = message.routed_experts, self._routed_experts
        shape, dtype = (num_tokens, *of_token), experts_dtype(num_experts)
        if not _is_equal(array.shape, shape) or array.dtype != dtype.name:
            raise ValueError(
                f"{name}: {array.dtype[:MAX_QUOTE]} routed_experts of shape {quoted(array.shape)}; "
                f"{dtype.name} of {list(shape)} were asked for."
            )
        if not array.data:
            return np.empty(shape, dtype)
        if len(array.data) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: {len(array.data)} bytes of experts for {list(shape)}.")
        return np.frombuffer(array.data, dtype).reshape(shape)

    def _check_experts(self, rollout: Rollout) -> None:
        """Numbers beyond the experts are one: the dtype's largest, for one that is not known."""
        if (experts := rollout.routed_experts) is None:
            return
        num_experts = self._routed_experts[2]
        beyond = experts[experts >= num_experts]
        if (beyond != np.iinfo(experts.dtype).max).any():
            raise ValueError(
                f"sample {quoted(rollout.sample_id)}: routed_experts has {beyond.min()}; there are "
                f"{num_experts} experts."
            )

    def _decode_mean_state(self, name: str, message: pb.Response) -> Float[np.ndarray, " D"] | None:
        """Checks that the requested metrics came; None if none were requested."""
        asked = self._call.metrics
        if asked is None:
            if message.mean_state or message.effective_ranks:
                raise ValueError(f"{name} was sent measured; nothing was to be measured.")
            return None
        wanted = encode({MetricKey(kind): Measurement(0.0, True) for kind in asked.names})
        missing = wanted.keys() - message.metrics.keys()
        if missing:
            raise ValueError(f"{name} was sent without {sorted(missing)[0]!r}, a metric asked for.")
        data = message.mean_state
        if not 0 < len(data) <= 4 * MAX_HIDDEN_WIDTH or len(data) % 4:
            raise ValueError(
                f"{name}: a mean state of {len(data)} bytes; it has 4 a dimension, of 1 to "
                f"{MAX_HIDDEN_WIDTH}."
            )
        return np.frombuffer(data, "<f4")


def encode_chunk(
    others: pb.TensorChunk | pb.StateChunk, data: UInt8[np.ndarray, " bytes"]
) -> bytes:
    """A serialised request or response with a chunk: its fields, then the data, copied once."""
    head = b"".join((others.SerializeToString(), FIELD_2, _varint(len(data))))
    return b"".join((FIELD_2, _varint(len(head) + len(data)), head, data.data))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def as_bytes(array: np.ndarray) -> UInt8[np.ndarray, " bytes"]:
    """The array's bytes in C order; a view where the array is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def weights_digest(specs: Sequence[TensorSpec], arrays: Iterable[np.ndarray]) -> str:
    """The digest of the version that a replica behind a server would have."""
    return manifest_digest(specs, [checksum(as_bytes(array)).digest() for array in arrays])


def are_finite(data: UInt8[np.ndarray, " bytes"], dtype: str) -> bool:
    """Whether all values are finite; `dtype` is one of WEIGHT_DTYPES."""
    if dtype == "float32":
        return bool(np.isfinite(data.view(np.float32)).all())
    # NumPy's own test of 16-bit floats is slow. Infinity and NaN are the largest bit patterns of
    # their sign: the largest signed integers if positive, else the largest unsigned ones.
    infinity = 0x7C00 if dtype == "float16" else 0x7F80
    positive, negative = data.view(np.int16), data.view(np.uint16)
    return not len(positive) or bool(
        positive.max() < infinity and negative.max() < infinity | 0x8000
    )


def _checker(section: str, record: Any) -> Callable[[str, bool, str], None]:
    """Returns a function that raises ValueError if the rule of a field does not hold."""

    def check(field: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"{section}.{field}={quoted(getattr(record, field))} must be {rule}.")

    return check


def _check_params(
    sampling: SamplingParams,
    hidden_states: HiddenStateParams,
    metrics: MetricParams | None,
    limits: ReplicaDescription,
) -> None:
    """Checks what all samples of a call share."""
    _check_sampling(sampling, limits)
    if hidden_states.layers:
        _check_hidden_states(hidden_states, limits)
    if metrics is not None:
        _check_metrics(metrics, hidden_states, limits)


def check_num_samples(count: int, limits: ReplicaDescription) -> None:
    if count == 0:
        raise ValueError("samples is empty; a call needs at least one.")
    if count > limits.max_prompts:
        raise LimitExceeded(f"{count} samples; the replica takes {limits.max_prompts} a call.")


def _checked_prompt(
    index: int, token_ids: Sequence[int] | Int[np.ndarray, " P"], limits: ReplicaDescription
) -> Int[np.ndarray, " P"]:
    """A copy of the ids, which the samples of a group share."""
    length = len(token_ids)
    if length == 0:
        raise ValueError(f"prompts[{index}] is empty; it needs at least one token.")
    if length > limits.max_prompt_tokens:
        raise LimitExceeded(
            f"prompts[{index}] has {length} tokens; the replica takes {limits.max_prompt_tokens}."
        )
    ids = np.array(token_ids, np.int32)
    _check_vocabulary(f"prompts[{index}]", ids, limits.vocab_size)
    ids.setflags(write=False)
    return ids


def _check_sampling(sampling: SamplingParams, limits: ReplicaDescription) -> None:
    check, limit = _checker("sampling", sampling), limits.max_response_tokens
    check("max_tokens", 1 <= sampling.max_tokens <= limit, f"in [1, {limit}]")
    most = {"top_k": limits.vocab_size, "min_tokens": sampling.max_tokens}
    for name, interval in DISTRIBUTION.items():
        interval = f"[0, {most[name]}]" if name in most else interval
        check(name, is_within(getattr(sampling, name), interval), in_words(interval))
    for field in ("eos_token_ids", "stop_token_ids"):
        num_ids = len(getattr(sampling, field))
        if num_ids > MAX_END_TOKENS:
            raise LimitExceeded(f"sampling.{field} has {num_ids} ids; at most {MAX_END_TOKENS}.")
        ids = np.array(getattr(sampling, field), np.int32)
        _check_vocabulary(f"sampling.{field}", ids, limits.vocab_size)
    _check_stop_strings(sampling.stop_strings, limits)
    if sampling.min_tokens and sampling.stop_strings:
        raise ValueError(
            f"sampling.min_tokens={sampling.min_tokens} keeps back tokens, and stop strings are "
            "texts; leave one of the two out."
        )
    ends = {*sampling.eos_token_ids, *sampling.stop_token_ids}
    has_others = not sampling.min_tokens or len(ends) < limits.vocab_size
    check("min_tokens", has_others, "0, because every token ends a response")


def _check_routed(is_asked: bool, limits: ReplicaDescription) -> None:
    if is_asked and not limits.routed_experts:
        raise NotOffered(
            "routed_experts are not sent by this replica; set rollout.router_replay=False, or take "
            "the JAX engine of this release and a model with experts."
        )


def _check_entropies(is_asked: bool, limits: ReplicaDescription) -> None:
    if is_asked:
        _check_choice("entropies", ["entropy"], limits.logprob_kinds)


def _check_stop_strings(strings: Sequence[str], limits: ReplicaDescription) -> None:
    if strings:
        _check_choice("sampling", ["stop_strings"], limits.sampling_kinds)
    name = "sampling.stop_strings"
    if len(strings) > MAX_STOP_STRINGS:
        raise LimitExceeded(f"{name} has {len(strings)} texts; at most {MAX_STOP_STRINGS}.")
    for text in strings:
        if not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise ValueError(
                f"{name} has {quoted(text)} of {len(text)} characters; each has 1 to "
                f"{MAX_STOP_CHARACTERS}."
            )
        if "\ufffd" in text:  # what decodes to it may change with the next token
            raise ValueError(f"{name} has {quoted(text)}, which contains U+FFFD.")
    if len(set(strings)) < len(strings):
        raise ValueError(f"{name}={quoted(strings)} has an entry twice.")


def _check_hidden_states(states: HiddenStateParams, limits: ReplicaDescription) -> None:
    reason = f": {limits.layers_reason}" if limits.layers_reason else ""
    _check_choice("hidden_states.layers", states.layers, limits.layers, reason)
    check = _checker("hidden_states", states)
    check("dtype", states.dtype in STATE_DTYPES, f"one of {', '.join(STATE_DTYPES)}")
    if not states.kinds:
        raise ValueError("hidden_states.kinds is empty; leave hidden_states.layers empty for none.")
    _check_choice("hidden_states.kinds", states.kinds, limits.state_kinds)


def _check_metrics(
    metrics: MetricParams, hidden_states: HiddenStateParams, limits: ReplicaDescription
) -> None:
    if not metrics.names:
        raise ValueError("metrics.names is empty; leave metrics out to measure nothing.")
    _check_choice("metrics.names", metrics.names, limits.metric_kinds)
    check = _checker("metrics", metrics)
    check("stride", metrics.stride >= 1, "at least 1")
    check("window", metrics.window in WINDOWS, f"one of {WINDOWS}")
    check("method", metrics.method in METHODS, f"one of {METHODS}")
    check("dtype", metrics.dtype in STATE_DTYPES, f"one of {', '.join(STATE_DTYPES)}")
    check("num_threads", metrics.num_threads >= 1, "at least 1")
    # The engine computes the states once, for the metrics and for the client: they must agree.
    if hidden_states.layers and (
        -1 not in hidden_states.layers or hidden_states.dtype != metrics.dtype
    ):
        raise ValueError(
            f"metrics are of {metrics.dtype} states of layer -1; hidden_states asks for "
            f"{hidden_states.dtype} of {list(hidden_states.layers)}: let it ask for them, or none."
        )


def _decode_token_array(
    name: str, array: TokenArray, message: pb.Response, num_tokens: int
) -> Shaped[np.ndarray, " T"] | None:
    """None for an optional array that was not sent."""
    data, name = getattr(message, array.wire), f"{name}: {array.wire}"
    if array.is_optional and not data:
        return None
    dtype = np.dtype(array.dtype)
    num_entries, rest = divmod(len(data), dtype.itemsize)
    if rest or num_entries > num_tokens or (array.is_per_token and num_entries < num_tokens):
        raise ValueError(
            f"{name} has {len(data)} bytes for {num_tokens} tokens of {dtype.itemsize}."
        )
    if dtype == np.bool_ and max(data, default=0) > 1:
        raise ValueError(f"{name} has a byte {max(data)}; it must be 0 or 1.")
    values = np.frombuffer(data, dtype)
    _check_finite(name, values)
    return values


def _check_finite(name: str, values: Shaped[np.ndarray, " T"]) -> None:
    if not np.isfinite(values).all():
        raise ValueError(f"{name} has values that are not finite.")


def _check_mask(
    name: str, arrays: Mapping[str, Shaped[np.ndarray, " T"] | None], is_aborted: bool
) -> None:
    """Context has no log-probability, and a complete response is more than context."""
    if (mask := arrays["response_mask"]) is None:
        return
    if not mask.any() and not is_aborted:
        raise ValueError(f"{name}: response_mask is 0 throughout; the policy sampled nothing.")
    for field in ("rollout_logprobs", "rollout_raw_logprobs"):
        values = arrays[field]
        if values is not None and values[~mask].any():
            raise ValueError(f"{name}: {field} must be 0 where response_mask is 0.")


def _check_vocabulary(name: str, ids: Int[np.ndarray, " T"], vocab_size: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise ValueError(f"{name} has token id {wrong}; ids must be in [0, {vocab_size}).")


def _check_name(field: str, value: str) -> None:
    if not 0 < len(value) <= MAX_NAME_LENGTH:
        raise ValueError(f"{field} has {len(value)} characters; it needs 1 to {MAX_NAME_LENGTH}.")


def _check_choice(field: str, values: Sequence, known: Sequence, reason: str = "") -> None:
    """Refuses entries that the replica does not have, and repeated ones."""
    if len(values) > len(known) + _SPARE_ENTRIES:  # if slightly longer, name the wrong entry
        raise ValueError(f"{field} has {len(values)} entries; the replica has {len(known)}.")
    for value in values:
        if value not in known:
            raise NotOffered(
                f"{field} has {quoted(value)}; the replica has {list(known)}{reason}. Leave it "
                "out, or start a replica that has it."
            )
    if len(set(values)) < len(values):
        raise ValueError(f"{field}={quoted(values)} has an entry twice.")


def _is_equal(values: Sequence[int], expected: Sequence[int]) -> bool:
    return len(values) == len(expected) and tuple(values) == tuple(expected)  # cheap test first


def quoted(value) -> str:
    """The beginning of `repr(value)`: a value that was sent may have any length."""
    if not isinstance(value, str | int | float):  # a repeated field
        text = repr(list(value[:MAX_QUOTE]))
    else:
        text = repr(value[: MAX_QUOTE + 1] if isinstance(value, str) else value)
    return text if len(text) <= MAX_QUOTE else f"{text[:MAX_QUOTE]}..."


def _some(items: Sequence[str], separator: str = ", ") -> str:
    """The first five items, and the number of the others."""
    more = f"{separator}and {len(items) - 5} more" if len(items) > 5 else ""
    return separator.join(item[:MAX_QUOTE] for item in items[:5]) + more
