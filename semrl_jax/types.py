"""Records that several rooms use. NumPy only: the rollout client loads neither JAX nor torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Float, Int, UInt

from semrl_jax.metrics.measurements import MetricKey, Metrics
from semrl_jax.metrics.names import ORDERS

if TYPE_CHECKING:
    from jax import Array

FinishReason = Literal["eos", "stop", "length", "aborted", "given"]
GIVEN: FinishReason = "given"  # a response of the data, which no engine sampled
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)[:-1]  # of sampled responses
# Metrics of single turns, by the name of the field of a rollout.
TURN_METRICS = {
    f"turn_{key.label}": key for key in (MetricKey("effective_rank", order) for order in ORDERS)
}
# Fields of `SamplingParams` that config.rollout, config.evaluation, plans of scores, vLLM and HTTP
# have too, by the same names. The values are their ranges, see `support.intervals`.
DISTRIBUTION: Mapping[str, str] = {
    "temperature": "[0, inf)",
    "top_p": "(0, 1]",
    "top_k": "[0, inf)",
    "min_p": "[0, 1]",
    "presence_penalty": "[-2, 2]",
    "frequency_penalty": "[-2, 2]",
    # Times a logit, far from the ends of float32, in which the wire has 0.001 as a little more.
    "repetition_penalty": "[0.001, 1000]",
    "min_tokens": "[0, inf)",
}
MAX_STOP_STRINGS = 64  # of a call
MAX_STOP_CHARACTERS = 128  # of a stop string


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One weight on the wire, with its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # NumPy name; "bfloat16" through ml_dtypes

    @property
    def num_bytes(self) -> int:
        item_size = 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize
        return math.prod(self.shape) * item_size


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Which low-rank adapters a replica applies to the products of its base, unmerged."""

    rank: int  # R, at least 1
    modules: tuple[str, ...]  # of every layer, by their Hugging Face names, such as mlp.up_proj

    def specs(self, base: Iterable[TensorSpec]) -> list[TensorSpec]:
        """The tensors of an adapter in the order of the base's: A [R, in], then B [out, R].

        They are float32, and B is scaled, so that a product is x W + (x A) B.
        """
        found = []
        for spec in base:
            name = re.fullmatch(r"(model\.layers\.\d+\.(.+))\.weight", spec.name)
            if name and name[2] in self.modules:
                num_out, num_in = spec.shape
                shapes = {"lora_A": (self.rank, num_in), "lora_B": (num_out, self.rank)}
                found += [
                    TensorSpec(f"{name[1]}.{leaf}.weight", shape, "float32")
                    for leaf, shape in shapes.items()
                ]
        return found


@dataclasses.dataclass(frozen=True)
class TensorSum:
    """What a replica says of one tensor as it holds it; see `models.checksums.array_sums`."""

    name: str  # of Hugging Face
    dtype: str  # that it is held in, as in `TensorSpec`
    checksum: int  # of its bits in the layout of Hugging Face, 32 bits
    norm: float


@dataclasses.dataclass(frozen=True)
class WeightVersion:
    """Identity of one set of weights.

    Attributes:
      run_id: the run that trained the weights; a replica belongs to one run.
      attempt_id: new at every start of the trainer, so that step 12 of a resumed run differs from
        step 12 of an earlier attempt.
      step: the training step that will sample with these weights, from 0.
      digest: hex SHA-256 over names, shapes, dtypes and checksums of all tensors; "" in a replica
        of the trainer's process, where weights stay on the devices.
    """

    run_id: str
    attempt_id: str
    step: int
    digest: str

    def __str__(self) -> str:
        return f"{self.run_id}/{self.attempt_id}/{self.step}/{self.digest[:12]}"


def manifest_digest(specs: Sequence[TensorSpec], checksums: Sequence[bytes]) -> str:
    """Hex SHA-256 of the manifest: one line per tensor with name, shape, dtype and checksum."""
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
      min_p: keeps tokens with at least this share of the largest probability; before top_k and
        top_p. 0 keeps all.
      max_tokens: response limit in tokens, the end token included.
      eos_token_ids, stop_token_ids: end a response with finish reason "eos" or "stop"; the token
        stays in the response.
      stop_strings: end a response with finish reason "stop", at the first token with which its
        decoded text contains one of them; special tokens add no text. A stop string may span
        several tokens. All tokens up to this one stay in the response.
      presence_penalty, frequency_penalty: subtracted from the logit of each token that the response
        has, once, and as often as the response has it. 0 changes nothing.
      repetition_penalty: divides positive logits, and multiplies others, of tokens that the prompt
        or the response has; before the other two. 1 changes nothing.
      min_tokens: a response has at least as many tokens before an end or stop token. It excludes
        stop strings.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0

    @property
    def is_truncated(self) -> bool:
        """Whether only the most probable tokens are kept."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens that a prompt or response has."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def is_modified(self) -> bool:
        """Whether the distribution is another than the model's at this temperature."""
        return self.is_truncated or self.has_penalties or self.min_tokens > 0


def distribution_of(options: Any) -> dict[str, Any]:
    """The fields of `DISTRIBUTION` of a section of the config, or of a record that has them."""
    return {name: getattr(options, name) for name in DISTRIBUTION}


@dataclasses.dataclass(frozen=True)
class HiddenStateParams:
    """Which hidden states are sent with a response.

    Attributes:
      layers: Hugging Face indices: -1 (or the number of layers) is the final layer after the final
        norm, i the input of layer i; empty sends none.
      dtype: "bfloat16" or "float32" on the wire.
      kinds: "decode", the states from which response tokens were sampled; "prefill", those at
        prompt tokens; or both.
    """

    layers: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    kinds: tuple[str, ...] = ("decode",)


@dataclasses.dataclass(frozen=True)
class MetricParams:
    """What a replica measures of the final hidden states of each response of a call.

    Attributes:
      names: of the replica's `metric_kinds`.
      stride, window, method: as in `metrics.hidden_state_metrics`.
      dtype: "bfloat16" or "float32", of the states it measures.
      num_threads: responses measured at the same time; at most the replica's processors.
    """

    names: tuple[str, ...]
    stride: int
    window: str = "exact"
    method: str = "gram"
    dtype: str = "bfloat16"
    num_threads: int = 1


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """One response to sample.

    Attributes:
      sample_id: deterministic and unique in the call, so that no response of a retry counts twice.
      group_id: the same for all requests of one group.
      sample_index: 0..G-1 within the group.
      prompt_ids: int32 token ids.
      seed: unsigned 64-bit, of all random numbers of this response.
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
      sample_id, group_id, sample_index, prompt_ids: as in the request.
      response_ids: int32 token ids, the end or stop token included: tokens that the policy sampled,
        and between them context, such as an environment's text.
      rollout_logprobs: float32 nats, under the distribution sampled from (after temperature, top-k
        and top-p); 0 at context, NaN of a given response.
      rollout_raw_logprobs: float32 nats, of the unmodified logits; 0 at context; None if the engine
        has none.
      versions: spans of weight versions over the response tokens, context included; one span
        unless the weights changed during the response; none of a given response.
      hidden_states: bfloat16 or float32; row t is the state whose logits produced response token t,
        and may hold anything at context. None if not requested.
      layers: the layer index of each of the L planes.
      generate_s: seconds from the call's admission to this response's end, on the replica.
      mean_state: float32 mean of the measured rows of layer -1, if the replica measured them.
      effective_ranks: float32, of each prefix of the response that ERV and ERA are computed from,
        in layer -1; None if it was not measured, or is too short for a prefix.
      prompt_states: [P, L, D] of the dtype of `hidden_states`; row p is the state at prompt token
        p, so that the last one produced response token 0. None if not requested; no rows if the
        response was aborted before its first token.
      response_mask: True on tokens that the policy sampled, False on context; all True if not
        given. The policy attends to context, but context has no log-probability, no row in a
        metric, no advantage and no loss, and no length or mean over tokens counts it. At least
        one token is True, unless the response was aborted.
      conversations: int32, the number of the conversation of each token, if an episode has several.
        A token attends to earlier tokens of its own conversation. The prompt starts number 0. None:
        there is one conversation.
      turn_rewards: float32, of each turn of the policy, which is a run of True in `response_mask`;
        None without an environment.
      turn_effective_rank, turn_effective_rank_velocity, turn_effective_rank_acceleration: float32,
        measured of each turn of an episode alone, in layer -1; NaN where not valid; None if not
        measured.
      environment_error: why the environment failed; "" if it did not.
      environment_s: seconds that the environment took to answer.
      prompt_logprobs: float32 nats, of each prompt token after those before it, of the unmodified
        logits; 0 of the first token. None if not requested.
      verdicts: of the environment by name, each summed over the turns, without its weight.
      routed_experts: of `experts_dtype`, the experts that each token of prompt and response went to
        in each of the M layers that have experts, in the order of the tokens; the largest number
        of the dtype: not known. The last token has none, and so may others at the end. None if not
        requested.
      step_ends: int32, ascending, the index of the last token of each step, which is a part of the
        response that the reward function judged by itself; None if it judged none.
      step_rewards: float32, of each step.
      entropies: float32 nats, of the distribution that each token was sampled from (of the model's
        own with temperature 0); vLLM counts all tokens but the 20 likeliest as one, which gives at
        most the entropy. 0 at context. None if not requested.
      parent: sample index of the response of its group whose first `num_prefix` tokens it begins
        with; -1 if it was sampled from its prompt, None in runs without `sampling.branching`.
      hint: share of a solution that its prompt has, see `sampling.hints`; None in runs without
        hints.
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
    effective_ranks: Float[np.ndarray, " K"] | None = None
    prompt_states: Float[np.ndarray, "_ L D"] | None = None
    response_mask: Bool[np.ndarray, " T"] | None = None  # never None in an instance
    conversations: Int[np.ndarray, " T"] | None = None
    turn_rewards: Float[np.ndarray, " _"] | None = None
    turn_effective_rank: Float[np.ndarray, " _"] | None = None
    turn_effective_rank_velocity: Float[np.ndarray, " _"] | None = None
    turn_effective_rank_acceleration: Float[np.ndarray, " _"] | None = None
    environment_error: str = ""
    environment_s: float = 0.0
    verdicts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    prompt_logprobs: Float[np.ndarray, " P"] | None = None
    routed_experts: UInt[np.ndarray, "_ M C"] | None = None
    step_ends: Int[np.ndarray, " _"] | None = None
    step_rewards: Float[np.ndarray, " _"] | None = None
    entropies: Float[np.ndarray, " T"] | None = None
    parent: int | None = None
    num_prefix: int = 0
    hint: float | None = None

    def __post_init__(self):
        if self.response_mask is None:
            object.__setattr__(self, "response_mask", np.ones(len(self.response_ids), bool))

    @property
    def is_given(self) -> bool:
        """Whether the response is of the data, in place of a sampled one; see `sampling.given`."""
        return self.finish_reason == GIVEN

    @property
    def num_policy_tokens(self) -> int:
        """The length of the response in all statistics: context does not count."""
        return int(self.response_mask.sum())

    @property
    def turn_lengths(self) -> Int[np.ndarray, " _"]:
        """The number of tokens of each turn of the policy."""
        edges = np.flatnonzero(np.diff(self.response_mask, prepend=False, append=False))
        return edges[1::2] - edges[::2]

    @property
    def num_state_bytes(self) -> int:
        """Size of the hidden states, and of the experts that tokens went to."""
        arrays = self.hidden_states, self.prompt_states, self.routed_experts
        return sum(array.nbytes for array in arrays if array is not None)

    def policy_states(self, layer: int) -> Float[np.ndarray, "_ D"]:
        """Hidden states of a layer without the rows of context; a view if there is no context."""
        states = self.hidden_states[:, self.layers.index(layer)]
        return states if self.response_mask.all() else states[self.response_mask]


class TokenArray(NamedTuple):
    """How the wire, the exchange between processes and the Parquet files store a field of rollouts.

    Attributes:
      name: the field, with one entry per token, or fewer.
      dtype: its NumPy dtype, little-endian; "": it may have several.
      wire: the bytes field of the message `Response`; "" if the codec has its own rule or none.
      is_recorded: whether the Parquet files of a run have a column of this name.
      is_optional: whether messages and files may omit it; see `is_left_out`.
      is_per_token: whether there is one entry per token of the response.
    """

    name: str
    dtype: str
    wire: str = ""
    is_recorded: bool = True
    is_optional: bool = False
    is_per_token: bool = True

    def is_left_out(self, values: np.ndarray | None) -> bool:
        """Whether a message omits these values: None, or a mask that is all True."""
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
    TokenArray(
        "effective_ranks", "<f4", wire="effective_ranks", is_optional=True, is_per_token=False
    ),
    TokenArray("entropies", "<f4", wire="entropies", is_recorded=False, is_optional=True),
    TokenArray("routed_experts", "", is_recorded=False, is_optional=True, is_per_token=False),
    # The trainer alone has these:
    TokenArray("conversations", "<i4", is_optional=True),
    *(
        TokenArray(name, "<f4", is_optional=True, is_per_token=False)
        for name in ("turn_rewards", *TURN_METRICS, "step_rewards")
    ),
    TokenArray("step_ends", "<i4", is_optional=True, is_per_token=False),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaDescription:
    """What a replica can do and what it serves; the reply to the first call.

    Attributes:
      protocol_major, protocol_minor: of the wire; the trainer refuses another major.
      replica_id: unique name of the process.
      engine: "jax", "vllm" or "fake".
      model_hash: hex SHA-256 of the architecture; the trainer compares it with its own.
      tokenizer_hash: hex SHA-256 of the tokenizer, "" if the replica has none.
      vocab_size: rows of the embedding, padding included.
      layers: hidden-state layers that the engine can send, Hugging Face indices.
      state_kinds, logprob_kinds: from "decode", "prefill" and from "sampling", "raw", "entropy".
      metric_kinds: metrics that the replica can compute itself.
      max_prompts: sequences per call; max_prompt_tokens and max_response_tokens are per sequence.
      version: the weights it serves, None before the first update.
      layers_reason: why the engine cannot send other layers, and what to do; "" if it can send all.
      sampling_kinds: "stop_strings" if the engine can end responses at stop strings.
      reads_memory: whether it can read the client's memory, so that weights need not be sent.
      is_deterministic: whether equal calls give equal responses, to the bit, on every replica that
        is started alike.
      calls_at_once: `Generate` calls that are best sent side by side; 0 if it does not say.
      compiling: the program that the replica compiles now, and for how long; "" if there is none.
      max_adapter_rank: the largest rank of adapters that it applies unmerged; 0 if it merges none.
      base_digest: the digest of the base that it holds for adapters, "" if it holds none.
      routed_experts: the numbers of layers with experts, of experts per token, and of experts of a
        layer, if the engine can send the experts that tokens went to; else ().
      is_free: whether the run of `version` has handed it over, so another one may send weights.
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
    sampling_kinds: tuple[str, ...] = ()
    reads_memory: bool = False
    is_deterministic: bool = False
    calls_at_once: int = 0
    compiling: str = ""
    max_adapter_rank: int = 0
    base_digest: str = ""
    routed_experts: tuple[int, ...] = ()
    is_free: bool = False


def experts_dtype(num_experts: int) -> np.dtype:
    """The smallest dtype for numbers of experts; its largest number is none of them."""
    return np.min_scalar_type(num_experts)


def config_hash(description: Mapping[str, Any]) -> str:
    """Hex SHA-256 of a JSON-able description, independent of key order."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


class RolloutBatch(NamedTuple):
    """The rollouts of one step as padded arrays, rows in (group, sample) order; a pytree.

    A row is [prompt, left-padded to P | response, right-padded to T], S = P + T columns.

    Attributes:
      token_ids, positions, segment_ids: int32, as in `data.padding.PaddedTokens`. In an episode of
        several conversations, segment c + 1 is conversation c, with positions of its own.
      response_mask: True on response tokens that the policy sampled, the end token included; False
        on padding, and on context between them, which `segment_ids` counts as tokens.
      rollout_logprobs: float32 nats as the engine reported; 0 where `response_mask` is False, NaN
        of given responses.
      given: True on given responses; None in a run without such.
      routed_experts: as `Rollout.routed_experts`, not known at padding; None: none are replayed.
    """

    token_ids: Int[Array, "B S"]
    positions: Int[Array, "B S"]
    segment_ids: Int[Array, "B S"]
    response_mask: Bool[Array, "B T"]
    rollout_logprobs: Float[Array, "B T"]
    given: Bool[Array, " B"] | None = None
    routed_experts: UInt[Array, "B S M C"] | None = None

    @property
    def sampled_mask(self) -> Bool[Array, "B T"]:
        """`response_mask`, False on given responses: the tokens that the engine sampled."""
        return (
            self.response_mask if self.given is None else self.response_mask & ~self.given[:, None]
        )

    @property
    def response_ids(self) -> Int[Array, "B T"]:
        """The response columns of `token_ids`."""
        return self.token_ids[:, -self.response_mask.shape[1] :]
