"""The SDK's protobuf messages as arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from jaxtyping import Float, Int

from semrl_jax.tinker.losses import LOSSES
from semrl_jax.tinker.proto import tinker_pb2 as pb
from semrl_jax.types import Rollout

_DTYPES = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}


class Example(NamedTuple):
    """A sequence; target t is the token that follows token t."""

    token_ids: Int[np.ndarray, " T"]
    targets: Int[np.ndarray, " T"]
    inputs: Mapping[str, Float[np.ndarray, " T"]]  # of the loss


class Pass(NamedTuple):
    """A forward pass, with a backward pass or without."""

    model_id: str
    seq_id: int
    examples: tuple[Example, ...]
    loss: str
    options: Mapping[str, float]
    is_backward: bool

    @property
    def kind(self) -> tuple[object, ...]:
        """Passes of one kind can be one program."""
        return self.loss, tuple(self.options.items()), self.is_backward


def read_pass(body: bytes) -> Pass:
    """Decodes a ForwardBackwardRequest; raises ValueError with one line."""
    try:
        request = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        raise ValueError("the body is no ForwardBackwardRequest of tinker 0.25 or later.") from None
    if request.loss_fn not in LOSSES:
        raise ValueError(f"loss_fn={request.loss_fn!r:.80} is not one of {', '.join(LOSSES)}.")
    if not request.data:
        raise ValueError("data is empty; send at least one datum.")
    options = dict(LOSSES[request.loss_fn].options)
    for name, value in request.loss_fn_config_v2.items() or request.loss_fn_config.items():
        number = getattr(value, "number", value)
        if name not in options or not math.isfinite(number):
            raise ValueError(
                f"loss_fn_config[{name!r:.80}]={number}: {request.loss_fn} has the finite options "
                f"{', '.join(options) or 'none'}."
            )
        options[name] = number
    examples = tuple(
        _example(f"data[{index}]", datum, request.loss_fn)
        for index, datum in enumerate(request.data)
    )
    backward = not request.forward_only
    return Pass(request.model_id, request.seq_id, examples, request.loss_fn, options, backward)


def encode_output(logprobs: Sequence[Float[np.ndarray, " _"]], metrics: Mapping[str, float]):
    """A ForwardBackwardOutput with the log-probabilities of each datum."""
    offsets = np.cumsum([0, *(4 * len(each) for each in logprobs)], dtype="<i8")
    data = np.concatenate(logprobs).astype("<f4").tobytes()
    field = pb.BatchedTensor(data=data, offsets=offsets.tobytes(), dtype=pb.DTYPE_FLOAT32)
    record = pb.ArrayRecord(fields={"logprobs": field}, num_datums=len(logprobs))
    return pb.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics
    ).SerializeToString()


def encode_samples(
    rollouts: Sequence[Rollout], prompt_logprobs: Float[np.ndarray, " P"] | None
) -> bytes:
    """A SampleResponse; log-probabilities are the model's own, at temperature 1."""
    sequences = [
        pb.SampledSequence(
            stop_reason=pb.STOP_REASON_LENGTH
            if rollout.finish_reason == "length"
            else pb.STOP_REASON_STOP,
            tokens=rollout.response_ids.astype("<i4").tobytes(),
            logprobs=rollout.rollout_raw_logprobs.astype("<f4").tobytes(),
        )
        for rollout in rollouts
    ]
    found = pb.SampleResponse(sequences=sequences)
    if prompt_logprobs is not None:
        found.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    return found.SerializeToString()


def _example(place: str, datum: pb.Datum, loss: str) -> Example:
    parts = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("kind") != "encoded_text":
            raise ValueError(f"{place}.model_input has a chunk that is no text; send tokens only.")
        parts.append(_array(f"{place}.model_input", chunk.encoded_text.tokens, "<i4"))
    token_ids = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not len(token_ids):
        raise ValueError(f"{place}.model_input is empty; send at least one token.")
    given = {name: _tensor(f"{place}.{name}", t) for name, t in datum.loss_fn_inputs.items()}
    needs, optional = LOSSES[loss].inputs, LOSSES[loss].optional
    for name in optional:
        given.setdefault(name, np.ones(len(token_ids), np.float32))
    if given.keys() != {"target_tokens", *needs}:
        raise ValueError(
            f"{place}.loss_fn_inputs has {', '.join(sorted(given))}; {loss} takes target_tokens, "
            f"{', '.join(needs)}."
        )
    for name, values in given.items():
        if values.shape != token_ids.shape:
            raise ValueError(
                f"{place}.{name} has shape {list(values.shape)}, but the input has "
                f"{len(token_ids)} tokens; send one value for each."
            )
        if not np.isfinite(values).all():
            raise ValueError(f"{place}.{name} has a value that is not finite.")
    targets = given.pop("target_tokens")
    inputs = {name: given[name].astype(np.float32) for name in needs}
    return Example(token_ids, targets, inputs)


def _tensor(place: str, tensor: pb.Tensor) -> np.ndarray:
    if tensor.WhichOneof("layout") == "sparse_csr" or tensor.dtype not in _DTYPES:
        raise ValueError(f"{place} must be a dense tensor of float32 or int64.")
    values = _array(place, tensor.dense, _DTYPES[tensor.dtype])
    if tensor.shape and tensor.shape != [len(values)]:
        raise ValueError(
            f"{place} has shape {list(tensor.shape)}, but {len(values)} values in one dimension "
            "are supported."
        )
    return values


def _array(place: str, data: bytes, dtype: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise ValueError(f"{place} has {len(data)} bytes, no whole number of values.")
    return np.frombuffer(data, dtype)
