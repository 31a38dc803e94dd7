"""Records that several rooms use. NumPy only: the rollout client loads neither JAX nor torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from semrl_jax.metrics.records import Metrics

if TYPE_CHECKING:
    from jax import Array

FinishReason = Literal["eos", "stop", "length", "aborted"]
FINISH_REASONS: tuple[FinishReason, ...] = ("eos", "stop", "length", "aborted")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one weight on the wire, in Hugging Face names."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # NumPy name; "bfloat16" through ml_dtypes

    @property
    def num_bytes(self) -> int:
        item_size = 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize
        return int(np.prod(self.shape, dtype=np.int64)) * item_size


@dataclasses.dataclass(frozen=True)
class WeightVersion:
    """Identity of one set of weights; equality is on all four fields.

    Attributes:
      run_id: the run that trained the weights; a replica belongs to one run.
      attempt_id: new at every start of the trainer. Step 12 of a resumed run is never mistaken for
        step 12 of an earlier attempt.
      step: the training step that will sample with these weights, from 0.
      digest: hex SHA-256 over names, shapes, dtypes and checksums of all tensors.
    """

    run_id: str
    attempt_id: str
    step: int
    digest: str

    def __str__(self) -> str:
        return f"{self.run_id}/{self.attempt_id}/{self.step}/{self.digest[:12]}"


def manifest_digest(specs: Sequence[TensorSpec], checksums: Sequence[bytes]) -> str:
    """Hex SHA-256 of the manifest: one line per tensor with name, shape, dtype and SHA-256."""
    digest = hashlib.sha256()
    for spec, checksum in zip(specs, checksums, strict=True):
        line = json.dumps([spec.name, list(spec.shape), spec.dtype, checksum.hex()])
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class VersionSpan:
    """Response tokens [start, end) were sampled with `version`."""

    version: WeightVersion
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one call samples; the same for all of its requests.

    Attributes:
      temperature: divides the logits; 0 is greedy.
      top_p: keeps the smallest set of tokens with at least this probability; 1 keeps all.
      top_k: keeps the k likeliest tokens; 0 keeps all.
      max_tokens: response limit in tokens, the end token included.
      eos_token_ids: end a response with finish reason "eos"; the token stays in the response.
      stop_token_ids: end a response with finish reason "stop"; the token stays in the response.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class HiddenStateParams:
    """Which hidden states travel with a response.

    Attributes:
      layers: Hugging Face indices: -1 (or the number of layers) is the final layer after the final
        norm, i the input of layer i; empty sends none.
      dtype: "bfloat16" or "float32" on the wire.
      kinds: "decode", the states that the response's tokens were sampled from, "prefill", those at
        the prompt's tokens, or both.
    """

    layers: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    kinds: tuple[str, ...] = ("decode",)


@dataclasses.dataclass(frozen=True)
class MetricParams:
    """What a replica measures of the final hidden states of each response of a call.

    Attributes:
      names: of the replica's `metric_kinds`.
      stride, window, method, window_growth: as `metrics.hidden_state_metrics` takes them.
      dtype: "bfloat16" or "float32", of the states it measures.
      num_threads: responses measured at the same time; at most the replica's processors.
    """

    names: tuple[str, ...]
    stride: int
    window: str = "exact"
    method: str = "gram"
    window_growth: float = 1.0
    dtype: str = "bfloat16"
    num_threads: int = 1


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """One response to sample.

    Attributes:
      sample_id: deterministic and unique in the call, so that no response of a retry counts twice.
      group_id: the prompt draw; the same for the G samples of one draw.
      sample_index: 0..G-1 within the group.
      prompt_ids: int32 token ids.
      seed: unsigned 64-bit; all randomness of this response follows from it.
    """

    sample_id: str
    group_id: int
    sample_index: int
    prompt_ids: Int[np.ndarray, " P"]
    seed: int

    @property
    def rollout_fields(self) -> dict[str, Any]:
        """The fields that the rollout has in common with this request."""
        return {name: value for name, value in vars(self).items() if name != "seed"}


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A prompt, one response and all that was recorded with it.

    Attributes:
      sample_id, group_id, sample_index: as in the request.
      prompt_ids: int32 token ids.
      response_ids: int32 token ids, the end or stop token included. What the policy sampled, and
        between it context, such as an environment's text; `response_mask` tells them apart.
      rollout_logprobs: float32 nats, under the distribution sampled from (after temperature, top-k
        and top-p); 0 at context.
      rollout_raw_logprobs: float32 nats, of the unmodified logits; 0 at context; None where the
        engine has none.
      finish_reason: "eos", "stop", "length" or "aborted".
      versions: spans of weight versions over the response tokens, context included; one span
        unless the weights changed in the middle.
      replica_id: which replica sampled it.
      hidden_states: [T, L, D] bfloat16 or float32; row t is the state whose logits produced
        response token t, and may hold anything where that token is context. None if not asked for.
      prompt_states: [P, L, D] of the same dtype; row p is the state at prompt token p, so that the
        last one gave response token 0. None if not asked for; no rows in a response that was
        aborted before its first token.
      layers: the layer index of each of the L planes.
      metrics: floats and bools, of this response.
      mean_state: float32 mean of the rows of layer -1 that were measured, where the replica
        measured them.
      generate_s: seconds from the call's admission to this response's end, on the replica.
      response_mask: True on tokens that the policy sampled, False on context; True throughout if
        not given. The policy attends to context, but context has no log-probability, no row in a
        metric, no advantage and no loss, and no length or mean over tokens counts it. At least
        one token is True, unless the response was aborted.
    """

    sample_id: str
    group_id: int
    sample_index: int
    prompt_ids: Int[np.ndarray, " P"]
    response_ids: Int[np.ndarray, " T"]
    rollout_logprobs: Float[np.ndarray, " T"]
    rollout_raw_logprobs: Float[np.ndarray, " T"] | None
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    replica_id: str = ""
    hidden_states: Float[np.ndarray, "T L D"] | None = None
    layers: tuple[int, ...] = ()
    metrics: Metrics = dataclasses.field(default_factory=dict)
    generate_s: float = 0.0
    mean_state: Float[np.ndarray, " D"] | None = None
    prompt_states: Float[np.ndarray, "_ L D"] | None = None
    response_mask: Bool[np.ndarray, " T"] | None = None  # never None in an instance

    def __post_init__(self):
        if self.response_mask is None:
            object.__setattr__(self, "response_mask", np.ones(len(self.response_ids), bool))

    @property
    def num_policy_tokens(self) -> int:
        """Response tokens that the policy sampled: the length of the response in all statistics."""
        return int(self.response_mask.sum())

    def policy_states(self, layer: int) -> Float[np.ndarray, "_ D"]:
        """Hidden states of a layer, without the rows of context; a view where there is none."""
        states = self.hidden_states[:, self.layers.index(layer)]
        return states if self.response_mask.all() else states[self.response_mask]


class TokenArray(NamedTuple):
    """How a field of `Rollout` with one entry per token is stored.

    The wire, the exchange between processes and the Parquet files follow `TOKEN_ARRAYS`.

    Attributes:
      name: the field.
      dtype: its NumPy dtype, little-endian.
      wire: the bytes field of the message `Response`; "" if the codec has a rule of its own.
      is_recorded: whether the Parquet files of a run have a column of this name.
      is_optional: whether messages and files may do without it; see `is_left_out`.
    """

    name: str
    dtype: str
    wire: str = ""
    is_recorded: bool = True
    is_optional: bool = False

    def is_left_out(self, values: np.ndarray | None) -> bool:
        """Whether a message does without these values: None, or a mask that is True throughout."""
        return self.is_optional and (
            values is None or (values.dtype == np.bool_ and bool(values.all()))
        )


TOKEN_ARRAYS = (
    TokenArray("prompt_ids", "<i4"),
    TokenArray("response_ids", "<i4"),
    TokenArray("rollout_logprobs", "<f4", wire="logprobs"),
    TokenArray(
        "rollout_raw_logprobs", "<f4", wire="raw_logprobs", is_recorded=False, is_optional=True
    ),
    TokenArray("response_mask", "|b1", wire="response_mask", is_optional=True),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaDescription:
    """What a replica can do and what it serves; the reply to the first call.

    Attributes:
      protocol_major, protocol_minor: of the wire; the trainer refuses another major.
      replica_id: unique name of the process.
      engine, engine_version: "jax", "vllm" or "fake".
      model_hash: hex SHA-256 of the architecture; the trainer compares it with its own.
      tokenizer_hash: hex SHA-256 of the tokenizer, "" where the replica has none.
      vocab_size: rows of the embedding, padding included.
      layers: hidden-state layers the engine can send, Hugging Face indices.
      state_kinds: "decode", "prefill".
      logprob_kinds: "sampling", "raw".
      metric_kinds: names the replica can compute itself.
      max_prompts: sequences a call may carry.
      max_prompt_tokens, max_response_tokens: per sequence.
      version: the weights it serves, None before the first update.
      layers_reason: why the engine cannot send other layers, and what to do; "" if it can send all.
    """

    protocol_major: int = 0
    protocol_minor: int = 0
    replica_id: str = ""
    engine: str
    engine_version: str
    model_hash: str
    tokenizer_hash: str
    vocab_size: int
    layers: tuple[int, ...]
    state_kinds: tuple[str, ...]
    logprob_kinds: tuple[str, ...]
    metric_kinds: tuple[str, ...] = ()
    max_prompts: int
    max_prompt_tokens: int
    max_response_tokens: int
    version: WeightVersion | None = None
    layers_reason: str = ""


def config_hash(description: Mapping[str, Any]) -> str:
    """Hex SHA-256 of a JSON-able description, independent of key order."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


class RolloutBatch(NamedTuple):
    """The rollouts of one step as padded arrays, rows in (group, sample) order; a pytree.

    A row is [prompt, left-padded to P | response, right-padded to T], S = P + T columns.

    Attributes:
      token_ids: int32; the pad id where padded.
      positions: int32; from 0 at the first prompt token, 0 where padded.
      segment_ids: int32; 1 on tokens, 0 on padding.
      response_mask: bool; True on response tokens that the policy sampled, the end token included;
        False on padding, and on context between them, which `segment_ids` counts as tokens.
      rollout_logprobs: float32 nats as the engine reported; 0 where `response_mask` is False.
    """

    token_ids: Int[Array, "B S"]
    positions: Int[Array, "B S"]
    segment_ids: Int[Array, "B S"]
    response_mask: Bool[Array, "B T"]
    rollout_logprobs: Float[Array, "B T"]

    @property
    def response_ids(self) -> Int[Array, "B T"]:
        """The response columns of `token_ids`."""
        return self.token_ids[:, -self.response_mask.shape[1] :]
