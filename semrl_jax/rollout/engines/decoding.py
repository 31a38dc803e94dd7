"""Batched decoding of one Generate call: jitted programs of fixed shapes, run by a host loop.

Each slot of the batch holds the KV cache of one response. A row of G slots shares the cache of a
prompt, which is then computed, kept and read once for them. A call may leave these caches for the
next one and begin with those of earlier calls: see keeping.py. Every step of the loop

1. prefills waiting prompts, each once, and inserts their responses into free slots
   (`prefill_and_insert`),
2. resizes the slots (`resize_slots`): the cache has room for the longest running response, and once
   no prompt waits the batch shrinks with the number of running responses, to rows of fewer slots,
3. generates up to `chunk` tokens in every slot (`decode_chunk`), and
4. collects the responses that have ended, which frees their slots. Stop strings are found here:
   tokens that were sampled after one are dropped, and the slot is made inactive.

All slots write the next token into the same column, so that it is one contiguous write. The
response columns are a ring: a response has the last ones before the next column.

The schedule depends on the requests and on the sampled lengths only, never on time.

On the policy's mesh, slots are split over the data axes, heads and vocabulary over `tensor`.

Measured without a gain on a CPU, with 64 responses of up to 1024 tokens: one batch in place of two,
parts that do not wait for each other, a batch that shrinks at each size of the cache, and matrix
products for the attention.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt, UInt32

from semrl_jax.data import StopMatcher
from semrl_jax.models import DATA_AXES, KVCache, Params, Policy
from semrl_jax.models.sharding import activation_spec
from semrl_jax.rollout.engines.keeping import Kept, Piece, insert, keep
from semrl_jax.rollout.engines.sampling import (
    SamplingKind,
    SamplingValues,
    block_size,
    penalised_logits,
    sample_tokens,
    sampling_entropies,
    split_sampling,
)
from semrl_jax.rollout.wire.codec import GenerateCall
from semrl_jax.support.programs import compiled_once
from semrl_jax.support.rounding import next_power_of_two, next_size
from semrl_jax.types import (
    FinishReason,
    HiddenStateParams,
    Rollout,
    SampleRequest,
    VersionSpan,
    experts_dtype,
)

MIN_BATCH = 4  # slots, and prompts of a prefill
MIN_PROMPT_COLUMNS = 8  # of the cache
SHORT_PROMPT = 32  # columns, up to which their number is a power of two
MAX_PROMPT_STATE_BYTES = 2**30  # of prompt states on the device, per prefill
MAX_PREFILL_TOKENS = 2**16  # of all prompts of a prefill, which has the features of all at once
FIRST_RESPONSE_COLUMNS = 128  # of the cache; more when the responses need them
MIN_END_TOKENS = 8  # smallest padded number of end tokens
EXTENSION = 16  # tokens that a program adds to each slot; more are added in parts
SHRINK = 0.6  # of the time of a step, at most, where the slots are arranged anew
MAX_PROGRAMS = 512  # compiled programs that this process keeps; some MB each


class Slots(NamedTuple):
    """The device state of B = R G slots: the G slots of a row are neighbours and share a prompt."""

    prompts: KVCache  # R rows of P columns
    cache: KVCache  # B rows: the responses
    final_states: Float[Array, "B D"]  # of the last token; the next token is sampled from them
    layer_inputs: Float[Array, "B L D"]  # of the same token; states of inner layers
    num_prompt: Int[Array, " B"]
    num_generated: Int[Array, " B"]
    keys: UInt32[Array, "B 2"]
    active: Bool[Array, " B"]
    counts: Int[Array, "B V"] | None = None  # of `penalised_logits`, if a token has a penalty


class Chunk(NamedTuple):
    """The tokens that `decode_chunk` sampled; entries after a response's end are invalid."""

    token_ids: Int[Array, "B C"]
    logprobs: Float[Array, "B C"]
    raw_logprobs: Float[Array, "B C"]
    entropies: Float[Array, "B C"] | Float[Array, "B 0"]  # no column if not asked for
    hidden_states: Float[Array, "B C L D"]
    experts: UInt[Array, "B C M K"]  # that the tokens went to, if asked for; else M is 0


def prompt_columns(longest: int) -> int:
    """Columns of the cache for prompts of at most `longest` tokens: 8, 16, 32, 48, 64, 96, ..."""
    short = max(next_power_of_two(min(longest, SHORT_PROMPT)), MIN_PROMPT_COLUMNS)
    return next_size(longest, short)


def _routing_shape(policy: Policy, is_asked: bool) -> tuple[tuple[int, int], np.dtype]:
    """Layers and experts per token of what is sent, and its dtype."""
    if not is_asked:
        return (0, 0), np.dtype(np.uint8)
    num_layers, per_token, num_experts = policy.config.routed_experts
    return (num_layers, per_token), experts_dtype(num_experts)


def _sent_experts(
    experts: Int[Array, "B T M K"], policy: Policy, is_asked: bool
) -> UInt[Array, "B T _ _"]:
    (num_layers, _), dtype = _routing_shape(policy, is_asked)
    return experts[:, :, :num_layers].astype(dtype)


def slot_specs(slots: Slots, mesh: Mesh) -> Slots:
    """The partition of the slots on the mesh; their number is a multiple of its data shards."""

    def of(leaf):
        is_cached = leaf.ndim == 4
        return activation_spec("cache", leaf.shape, mesh) if is_cached else PartitionSpec(DATA_AXES)

    return jax.tree.map(of, slots)


def _with_sharding(slots: Slots, mesh: Mesh | None) -> Slots:
    """Constrains the result of every program, so that donated slots are updated in place."""
    if mesh is None:
        return slots
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        slot_specs(slots, mesh),
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )
    return jax.lax.with_sharding_constraint(slots, shardings)


@compiled_once
@functools.partial(
    jax.jit, static_argnames=("policy", "rows", "group", "num_prompt_columns", "columns", "counted")
)
def empty_slots(
    *,
    policy: Policy,
    rows: int,
    group: int = 1,
    num_prompt_columns: int,
    columns: int,
    counted: bool = False,
) -> Slots:
    """R rows of G free slots with `columns` for responses; each device allocates its own part.

    `counted`: whether tokens are counted, for penalties.
    """
    config, dtype = policy.config, jnp.dtype(policy.compute_dtype)
    batch = rows * group

    def cache(rows, columns):
        heads, width = (rows, config.num_kv_heads), config.head_dim
        return KVCache(
            tuple(jnp.zeros((*heads, width, columns), dtype) for _ in range(config.num_layers)),
            tuple(jnp.zeros((*heads, columns, width), dtype) for _ in range(config.num_layers)),
            jnp.full((rows, columns), -1, jnp.int32),
        )

    slots = Slots(
        prompts=cache(rows, num_prompt_columns),
        cache=cache(batch, columns),
        final_states=jnp.zeros((batch, config.hidden_size), dtype),
        layer_inputs=jnp.zeros((batch, config.num_layers, config.hidden_size), dtype),
        num_prompt=jnp.zeros(batch, jnp.int32),
        num_generated=jnp.zeros(batch, jnp.int32),
        keys=jnp.zeros((batch, 2), jnp.uint32),
        active=jnp.zeros(batch, bool),
        counts=jnp.zeros((batch, config.vocab_size), jnp.int32) if counted else None,
    )
    return _with_sharding(slots, policy.mesh)


@compiled_once
@functools.partial(
    jax.jit, static_argnames=("policy", "prompt_states", "routed"), donate_argnames="slots"
)
def prefill_and_insert(
    params: Params,
    slots: Slots,
    token_ids: Int[Array, "N P"],
    segment_ids: Int[Array, "N P"],
    keys: UInt32[Array, "B 2"],
    source: Int[Array, " R"],
    begins: Bool[Array, " B"],
    *,
    policy: Policy,
    prompt_states: HiddenStateParams,
    routed: bool = False,
) -> tuple[Slots, Float[Array, "N P K D"], UInt[Array, "N P _ _"]]:
    """Prefills N left-padded prompts, and begins a response in every slot that `begins`.

    `source` has the new prompt of each row of slots; -1 leaves the row as it is. Also returns the
    prompts' states in the K layers of `prompt_states`, and their experts if they are `routed`.
    """
    positions = jnp.maximum(jnp.cumsum(segment_ids, axis=1) - 1, 0)
    final_states, layer_inputs, prompt, experts, all_states = policy.prefill(
        params, token_ids, positions, segment_ids, prompt_states.layers
    )
    of_slots = jnp.repeat(source, len(begins) // len(source))

    def chosen(is_new, old, new):
        return jnp.where(is_new.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    def of_rows(old, of_prompts):
        return chosen(source >= 0, old, of_prompts[jnp.maximum(source, 0)])

    def started(old, of_prompts):
        return chosen(begins, old, of_prompts[jnp.maximum(of_slots, 0)])

    slots = Slots(
        prompts=jax.tree.map(of_rows, slots.prompts, prompt),
        # Position -1 clears the columns of the slot's previous response.
        cache=slots.cache._replace(positions=chosen(begins, slots.cache.positions, -1)),
        final_states=started(slots.final_states, final_states),
        layer_inputs=started(slots.layer_inputs, layer_inputs),
        num_prompt=started(slots.num_prompt, jnp.sum(segment_ids, axis=1)),
        num_generated=chosen(begins, slots.num_generated, 0),
        keys=chosen(begins, slots.keys, keys),
        active=slots.active | begins,
        counts=slots.counts,
    )
    all_states = all_states.astype(jnp.dtype(prompt_states.dtype))
    experts = _sent_experts(experts, policy, routed)
    return _with_sharding(slots, policy.mesh), all_states, experts


@compiled_once
@functools.partial(jax.jit, static_argnames="mesh", donate_argnames="slots")
def count_prompts(
    slots: Slots, token_ids: Int[Array, "N P"], source: Int[Array, " B"], *, mesh: Mesh | None
) -> Slots:
    """Begins the counts of slots with a new prompt.

    `source` has the prompt of each slot; -1 leaves the slot as it is. Padding is beyond the
    vocabulary.
    """
    none_used = jnp.zeros(slots.counts.shape[1], jnp.int32)
    is_used = jax.vmap(lambda ids: none_used.at[ids].set(1, mode="drop"))(token_ids)
    counts = jnp.where(source[:, None] >= 0, is_used[jnp.maximum(source, 0)], slots.counts)
    return _with_sharding(slots._replace(counts=counts), mesh)


@compiled_once
@functools.partial(jax.jit, static_argnames="policy")
def prompt_logprobs(
    params: Params, states: Float[Array, "N P 1 D"], token_ids: Int[Array, "N P"], *, policy: Policy
) -> Float[Array, "N P"]:
    """The log-probability of each prompt token after those before it; 0 of the first column."""
    found, _ = policy.token_logprobs(params, states[:, :-1, 0], token_ids[:, 1:])
    return jnp.pad(found, ((0, 0), (1, 0)))


@compiled_once
@functools.partial(jax.jit, static_argnames=("policy", "routed"), donate_argnames="slots")
def extend_slots(
    params: Params,
    slots: Slots,
    token_ids: Int[Array, "B T"],
    counts: Int[Array, " B"],
    column: Int[Array, ""],
    *,
    policy: Policy,
    routed: bool = False,
) -> tuple[Slots, UInt[Array, "B T _ _"]]:
    """Adds the last `counts[b]` tokens of each row to its slot's prompt, from `column` on.

    Also returns their experts, if they are `routed`.
    """
    index = jnp.arange(token_ids.shape[1])[None] - (token_ids.shape[1] - counts)[:, None]
    positions = jnp.where(index >= 0, slots.num_prompt[:, None] + index, -1)
    final_states, layer_inputs, cache, experts, _ = policy.extend(
        params, token_ids, positions, column, slots.cache, slots.prompts
    )

    def chosen(new, old):
        return jnp.where((counts > 0).reshape(-1, *[1] * (old.ndim - 1)), new, old)

    slots = slots._replace(
        cache=cache,
        final_states=chosen(final_states, slots.final_states),
        layer_inputs=chosen(layer_inputs, slots.layer_inputs),
        num_prompt=slots.num_prompt + counts,
    )
    return _with_sharding(slots, policy.mesh), _sent_experts(experts, policy, routed)


@compiled_once
@functools.partial(
    jax.jit,
    static_argnames=("policy", "kind", "hidden_states", "num_tokens", "routed", "entropies"),
    donate_argnames="slots",
)
def decode_chunk(
    params: Params,
    slots: Slots,
    next_column: Int[Array, ""],
    max_tokens: Int[Array, ""],
    sampling: SamplingValues,
    end_ids: Int[Array, " E"],
    *,
    policy: Policy,
    kind: SamplingKind,
    hidden_states: HiddenStateParams,
    num_tokens: int,
    routed: bool = False,
    entropies: bool = False,
) -> tuple[Slots, Chunk]:
    """Generates up to `num_tokens` tokens in every active slot; ends early once none is active.

    The first one is written at `next_column` of the response columns. A response ends with one of
    the tokens `end_ids` (-1 is padding), or after `max_tokens` tokens.
    """
    batch = slots.active.shape[0]
    num_layers, layers = policy.config.num_layers, hidden_states.layers
    state_dtype = jnp.dtype(hidden_states.dtype)
    num_columns = slots.cache.positions.shape[1]
    routing, experts_dtype = _routing_shape(policy, routed)
    chunk = Chunk(
        jnp.zeros((batch, num_tokens), jnp.int32),
        jnp.zeros((batch, num_tokens), jnp.float32),
        jnp.zeros((batch, num_tokens), jnp.float32),
        jnp.zeros((batch, num_tokens if entropies else 0), jnp.float32),
        jnp.zeros((batch, num_tokens, len(layers), policy.config.hidden_size), state_dtype),
        jnp.zeros((batch, num_tokens, *routing), experts_dtype),
    )

    def decode_step(carry):
        index, slots, chunk = carry
        logits = policy.logits(params, slots.final_states)
        tokens, logprobs, raw_logprobs = _sample(
            logits, slots, end_ids, sampling, kind, policy.mesh
        )
        states = [
            slots.final_states if layer in (-1, num_layers) else slots.layer_inputs[:, layer]
            for layer in layers
        ]
        chunk = chunk._replace(
            token_ids=chunk.token_ids.at[:, index].set(tokens),
            logprobs=chunk.logprobs.at[:, index].set(logprobs),
            raw_logprobs=chunk.raw_logprobs.at[:, index].set(raw_logprobs),
            hidden_states=chunk.hidden_states.at[:, index].set(
                jnp.stack(states, axis=1).astype(state_dtype)
            )
            if states
            else chunk.hidden_states,
        )
        if entropies:
            of_token = sampling_entropies(
                _penalised(logits, slots, end_ids, sampling), sampling, kind=kind
            )
            chunk = chunk._replace(entropies=chunk.entropies.at[:, index].set(of_token))
        ended = jnp.any(tokens[:, None] == end_ids[None, :], axis=1)
        num_generated = jnp.where(slots.active, slots.num_generated + 1, slots.num_generated)
        active = slots.active & ~ended & (num_generated < max_tokens)
        final_states, layer_inputs, cache, experts, _ = policy.decode(
            params,
            tokens,
            slots.num_prompt + slots.num_generated,
            (next_column + index) % num_columns,
            slots.cache,
            slots.prompts,
        )
        slots = slots._replace(
            cache=cache,
            final_states=final_states,
            layer_inputs=layer_inputs,
            num_generated=num_generated,
            active=active,
            counts=_added(slots.counts, tokens),
        )
        if routed:
            own = _sent_experts(experts, policy, routed)[:, 0]
            chunk = chunk._replace(experts=chunk.experts.at[:, index].set(own))
        return index + 1, slots, chunk

    _, slots, chunk = jax.lax.while_loop(
        lambda carry: (carry[0] < num_tokens) & jnp.any(carry[1].active),
        decode_step,
        (jnp.int32(0), slots, chunk),
    )
    return _with_sharding(slots, policy.mesh), chunk


def _added(counts: Int[Array, "B V"] | None, tokens: Int[Array, " B"]) -> Int[Array, "B V"] | None:
    """`Slots.counts` after these tokens."""
    if counts is None:
        return None
    return jax.vmap(lambda row, token: row.at[token].add(2))(counts, tokens)


def _sample(
    logits: Float[Array, "B V"],
    slots: Slots,
    end_ids: Int[Array, " E"],
    sampling: SamplingValues,
    kind: SamplingKind,
    mesh: Mesh | None,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """Samples a token in every slot; see `sample_tokens`."""
    if sampling.penalties is None:
        return _draw(logits, slots, sampling, kind, mesh)
    penalised = _penalised(logits, slots, end_ids, sampling)
    tokens, logprobs, _ = _draw(penalised, slots, sampling, kind, mesh)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return tokens, logprobs, chosen - jax.nn.logsumexp(logits, axis=1)


def _penalised(
    logits: Float[Array, "B V"], slots: Slots, end_ids: Int[Array, " E"], sampling: SamplingValues
) -> Float[Array, "B V"]:
    if sampling.penalties is None:
        return logits
    return penalised_logits(logits, slots.counts, slots.num_generated, end_ids, sampling.penalties)


def _draw(
    logits: Float[Array, "B V"],
    slots: Slots,
    sampling: SamplingValues,
    kind: SamplingKind,
    mesh: Mesh | None,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """Runs `sample_tokens` with logits split over the vocabulary, or over rows.

    Rows are split for top-k and top-p, which sort them, and where a device would have a part of a
    block of the vocabulary. This moves each logit to another device once.
    """
    draw = functools.partial(sample_tokens, kind=kind)
    arguments = logits, slots.keys, slots.num_generated, sampling
    if mesh is None or mesh.shape["tensor"] == 1 or kind == "greedy":
        return draw(*arguments)
    num_tokens, num_parts = logits.shape[1], mesh.shape["tensor"]
    by_slot = PartitionSpec(DATA_AXES)
    in_whole_blocks = num_tokens % (num_parts * block_size(num_tokens)) == 0
    if kind != "truncated" and in_whole_blocks:
        return jax.shard_map(
            functools.partial(draw, axis="tensor"),
            mesh=mesh,
            in_specs=(PartitionSpec(DATA_AXES, "tensor"), by_slot, by_slot, PartitionSpec()),
            out_specs=by_slot,
            check_vma=False,  # JAX does not infer that gathered values are the same on all devices
        )(*arguments)
    # If the rows cannot be split over all devices, those along `tensor` sample the same rows.
    fits = logits.shape[0] % mesh.size == 0
    rows = PartitionSpec((*DATA_AXES, "tensor") if fits else DATA_AXES)

    def constrained(arrays):  # else the compiler also splits other computations by these rows
        return jax.lax.with_sharding_constraint(arrays, NamedSharding(mesh, by_slot))

    return constrained(
        jax.shard_map(
            draw, mesh=mesh, in_specs=(rows, rows, rows, PartitionSpec()), out_specs=rows
        )(logits, *constrained((slots.keys, slots.num_generated)), sampling)
    )


@compiled_once
@functools.partial(jax.jit, static_argnames=("columns", "mesh"))
def resize_slots(
    slots: Slots,
    kept: Int[Array, " B"],
    kept_rows: Int[Array, " R"],
    first_column: Int[Array, ""] | None,
    *,
    columns: int,
    mesh: Mesh | None = None,
) -> Slots:
    """Gathers B slots and R rows of prompts, and moves their ring to one of `columns` columns.

    The ring then begins with what is at `first_column` now; None leaves all columns where they are,
    which is faster.

    `kept` and `kept_rows` have indices; one beyond the end gives a free slot or row. On a mesh they
    have equal parts, one per data shard, and indices count from the shard's first slot or row.
    """

    def resize_shard(slots, kept, kept_rows, first_column):
        def moved(array, axis, empty=0):
            size = min(columns, array.shape[axis])
            if first_column is None:
                array = jax.lax.slice_in_dim(array, 0, size, axis=axis)
            else:
                array = jnp.concatenate([array, array], axis)
                array = jax.lax.dynamic_slice_in_dim(array, first_column, size, axis)
            added = [(0, 0)] * array.ndim
            added[axis] = 0, columns - size
            return jnp.pad(array, added, constant_values=empty)

        def taken(array, indices=kept, fill_value=0):
            return jnp.take(array, indices, axis=0, mode="fill", fill_value=fill_value)

        def of_rows(array):
            return taken(array, kept_rows, -1 if array.ndim == 2 else 0)

        cache = slots.cache
        return jax.tree.map(taken, slots)._replace(
            prompts=jax.tree.map(of_rows, slots.prompts),
            cache=KVCache(
                tuple(moved(taken(keys), 3) for keys in cache.keys),
                tuple(moved(taken(values), 2) for values in cache.values),
                moved(taken(cache.positions, fill_value=-1), 1, empty=-1),
            ),
        )

    if mesh is None:
        return resize_shard(slots, kept, kept_rows, first_column)
    specs, by_slot, whole = slot_specs(slots, mesh), PartitionSpec(DATA_AXES), PartitionSpec()
    # In a shard_map, because the compiler would gather all slots on every device.
    return jax.shard_map(
        resize_shard, mesh=mesh, in_specs=(specs, by_slot, by_slot, whole), out_specs=specs
    )(slots, kept, kept_rows, first_column)


_JITTED = (
    empty_slots, prefill_and_insert, count_prompts, prompt_logprobs, extend_slots, decode_chunk,
    resize_slots, keep, insert,
)  # fmt: skip


def _key(request: SampleRequest) -> tuple[int, int]:
    """The random key of its noise."""
    return request.seed >> 32, request.seed & 0xFFFFFFFF


class _Arrangement(NamedTuple):
    """Slots of all devices: the slots of a row share the cache of a prompt."""

    rows: int
    group: int

    @property
    def batch(self) -> int:
        return self.rows * self.group


@dataclasses.dataclass
class _Response:
    request: SampleRequest
    prompt: bytes  # token ids in the row of its slot
    # Per chunk, the arrays of `Chunk`.
    pieces: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)
    num_tokens: int = 0  # in the pieces
    prompt_states: np.ndarray | None = None  # [P, K, D], if asked for
    prompt_logprobs: np.ndarray | None = None  # [P], if asked for
    matcher: StopMatcher | None = None  # if the call has stop strings
    begin: Kept | None = None  # what it continues
    prompt_experts: np.ndarray | None = None  # [P, M, K], if asked for

    @property
    def num_shared(self) -> int:
        """Tokens in the row of its slot."""
        return self.begin.num_prompt if self.begin else len(self.request.prompt_ids)

    @property
    def num_kept(self) -> int:
        """Tokens of its prompt that are in its slot from the start."""
        return len(self.begin.token_ids) - self.begin.num_prompt

    @property
    def added(self) -> Int[np.ndarray, " N"]:
        """The other tokens of its prompt."""
        return self.request.prompt_ids[len(self.begin.token_ids) :]

    @property
    def token_ids(self) -> Int[np.ndarray, " T"]:
        """Its prompt and all tokens that were sampled."""
        return np.concatenate([self.request.prompt_ids, *(piece[0] for piece in self.pieces)])

    @property
    def experts(self) -> UInt[np.ndarray, "T M K"] | None:
        """The experts of `token_ids`, if they were asked for."""
        if self.prompt_experts is None:
            return None
        return np.concatenate([self.prompt_experts, *(piece[-1] for piece in self.pieces)])


class DecodingCall:
    """One Generate call on the JAX engine: call `step` until `done`. Not thread-safe.

    Args:
      policy, params: the model; the slots are split over the policy's mesh.
      max_batch: limit on the responses that all devices decode at once. There may be more slots:
        rows are rounded up by `next_size` per data shard, and have more slots than responses where
        that costs less.
      chunk: tokens generated per step and slot.
      new_matcher: makes the matcher of a response; None if the call has no stop strings.
      kept: by sample id, caches with which requests of the call begin.

    Attributes:
      kept: those that the call leaves; complete once it is `done`.
    """

    def __init__(
        self,
        policy: Policy,
        params: Params,
        call: GenerateCall,
        *,
        max_batch: int,
        chunk: int,
        new_matcher: Callable[[], StopMatcher] | None = None,
        kept: Mapping[str, Kept] = MappingProxyType({}),
    ):
        # Drops all compiled programs once there are too many: clients could fill the memory.
        if sum(function._cache_size() for function in _JITTED) > MAX_PROGRAMS:
            for function in _JITTED:
                function.clear_cache()
        self._policy = policy
        self._params = params
        self._call = call
        asked = call.hidden_states
        # Split by kind: calls without states of one kind then share that kind's programs.
        self._prompt_states, self._response_states = (
            HiddenStateParams(asked.layers if kind in asked.kinds else (), asked.dtype)
            for kind in ("prefill", "decode")
        )
        self._sends_prompt_states = bool(self._prompt_states.layers)
        if call.prompt_logprobs:  # computed from these states
            self._prompt_states = HiddenStateParams((-1,), policy.compute_dtype)
        if call.on_tokens:
            chunk = 1  # so that each token comes at once
        self._chunk = chunk
        self._new_matcher = new_matcher
        self._started = time.monotonic()
        shape = {} if policy.mesh is None else policy.mesh.shape
        self._num_shards = math.prod(shape.get(axis, 1) for axis in DATA_AXES)
        self._max_batch = max_batch
        num_slots = min(max_batch, len(call.requests))
        # Then all responses begin together, and no column is used again before the end.
        can_keep = num_slots == len(call.requests) and self._num_shards == 1
        can_keep &= not self._prompt_states.layers
        self._keeps = can_keep and call.keep
        self.kept: dict[str, Kept] = {}
        self._ended: list[tuple[int, _Response]] = []  # with their slots, if they are to be kept
        responses = [_Response(request, request.prompt_ids.tobytes()) for request in call.requests]
        for response in responses if can_keep else ():
            if found := kept.get(response.request.sample_id):
                response.begin, response.prompt = found, found.prompt
        self._continued = [response for response in responses if response.begin]
        self._waiting = collections.deque(each for each in responses if not each.begin)
        self._prompt_columns = prompt_columns(max(each.num_shared for each in responses))
        # Columns before the first token: those of earlier turns, and of what follows them.
        self._num_kept = max((each.num_kept for each in self._continued), default=0)
        num_added = max((len(each.added) for each in self._continued), default=0)
        self._num_added = -(-num_added // EXTENSION) * EXTENSION
        self._first_column = self._num_kept + self._num_added
        self._next_column = self._first_column  # of the ring of response columns
        self._response_columns = self._columns_for(self._first_column + chunk)
        by_prompt = itertools.groupby([*self._continued, *self._waiting], lambda each: each.prompt)
        responses = [len(list(group)) for _, group in by_prompt]
        if num_slots < len(call.requests):  # a slot that is free takes any prompt
            responses = [1] * num_slots
        # Rows of `group` slots each, which share the cache of a prompt.
        self._arrangement = self._cheapest([responses], max(responses))
        self._running: list[_Response | None] = [None] * self._arrangement.batch  # by slot
        self._slots: Slots | None = None  # until the first step: other calls may run before
        self._kind, self._values = split_sampling(call.sampling)
        end_ids = sorted({*call.sampling.eos_token_ids, *call.sampling.stop_token_ids})
        num_padded = max(next_power_of_two(len(end_ids)), MIN_END_TOKENS)
        self._end_ids = np.full(num_padded, -1, np.int32)
        self._end_ids[: len(end_ids)] = end_ids

    @property
    def done(self) -> bool:
        return not self._continued and not self._waiting and not any(self._running)

    @property
    def num_slots(self) -> int:
        """How many slots the next step needs, before they are rounded up."""
        num_waiting = len(self._continued) + len(self._waiting)
        num_responses = num_waiting + sum(map(bool, self._running))
        return min(num_responses, self._max_batch)

    @property
    def num_entries(self) -> int:
        """Slots times columns of the cache: what the last step read for each token."""
        return self._arrangement.batch * self._response_columns

    def step(self) -> list[Rollout]:
        """Prefills, generates one chunk, and returns the responses that ended, in slot order."""
        if self._slots is None:
            self._slots = empty_slots(
                policy=self._policy,
                rows=self._arrangement.rows,
                group=self._arrangement.group,
                num_prompt_columns=self._prompt_columns,
                columns=self._response_columns,
                counted=self._call.sampling.has_penalties,
            )
            if self._continued:
                self._continue()
        self._prefill()
        self._resize()
        self._slots, chunk = decode_chunk(
            self._params,
            self._slots,
            np.int32(self._next_column),
            np.int32(self._call.sampling.max_tokens),
            self._values,
            self._end_ids,
            policy=self._policy,
            kind=self._kind,
            hidden_states=self._response_states,
            num_tokens=self._chunk,
            routed=self._call.routed_experts,
            entropies=self._call.entropies,
        )
        self._next_column = (self._next_column + self._chunk) % self._response_columns
        ended = self._collect(chunk)
        if self.done:
            self._keep_ended()
            self._slots = None
        return ended

    def abort(self) -> list[Rollout]:
        """Ends the call and returns all remaining responses as "aborted", with their tokens."""
        rest = [*filter(None, self._running), *self._continued, *self._waiting]
        self._running = [None] * len(self._running)
        self._continued.clear()
        self._waiting.clear()
        return [self._rollout(response, "aborted") for response in rest]

    def _continue(self) -> None:
        """Puts kept caches into slots, and adds the other tokens of these prompts."""
        num_rows, group, batch = *self._arrangement, self._arrangement.batch
        num_placed = 0  # rows
        for _, responses in itertools.groupby(self._continued, lambda each: each.prompt):
            for slot, response in enumerate(responses, num_placed * group):
                self._running[slot] = response
            num_placed = slot // group + 1
        placed = [(slot, response) for slot, response in enumerate(self._running) if response]
        self._continued = []
        num_prompt, counts = np.zeros((2, batch), np.int32)
        keys, is_active = np.zeros((batch, 2), np.uint32), np.zeros(batch, bool)
        token_ids = np.zeros((batch, self._num_added), np.int32)
        for slot, response in placed:
            response.matcher = self._new_matcher() if self._new_matcher else None
            num_prompt[slot], counts[slot] = len(response.begin.token_ids), len(response.added)
            token_ids[slot, -len(response.added) :] = response.added
            keys[slot], is_active[slot] = _key(response.request), True
        caches = Piece(self._slots.prompts, self._slots.cache)
        for piece in {id(each.begin.piece): each.begin.piece for _, each in placed}.values():
            rows, slots = np.full(num_rows, -1, np.int32), np.full(batch, -1, np.int32)
            for slot, response in placed:
                if response.begin.piece is piece:
                    rows[slot // group], slots[slot] = response.begin.row, response.begin.slot
            caches = insert(*caches, piece, rows, slots, mesh=self._policy.mesh)
        for _, response in placed:  # frees the memory
            response.begin = dataclasses.replace(response.begin, piece=None)
        vectors = {"num_prompt": num_prompt, "keys": keys, "active": is_active}
        self._slots = self._slots._replace(
            prompts=caches.prompts,
            cache=caches.cache,
            **{
                name: jax.device_put(vector, getattr(self._slots, name).sharding)
                for name, vector in vectors.items()
            },
        )
        source = np.full(batch, -1, np.int32)
        source[[slot for slot, _ in placed]] = np.arange(len(placed))
        self._count([response.request.prompt_ids for _, response in placed], source)
        added = []
        for start in range(0, self._num_added, EXTENSION):
            end = start + EXTENSION
            self._slots, experts = extend_slots(
                self._params,
                self._slots,
                token_ids[:, start:end],
                np.clip(counts - (self._num_added - end), 0, EXTENSION),
                np.int32(self._num_kept + start),
                policy=self._policy,
                routed=self._call.routed_experts,
            )
            added.append(experts)
        if self._call.routed_experts:
            experts = np.concatenate(jax.device_get(added), axis=1)
            for slot, response in placed:
                own = experts[slot, -len(response.added) :]
                response.prompt_experts = np.concatenate([response.begin.experts, own])

    def _prefill(self) -> None:
        num_rows, group, batch = *self._arrangement, self._arrangement.batch
        rows_of_slots = np.arange(batch).reshape(num_rows, group)
        free = [
            row
            for row in range(num_rows)
            if not any(map(self._running.__getitem__, rows_of_slots[row]))
        ]
        # Alternate between the data shards: the batch shrinks to the fullest of them.
        free.sort(key=lambda row: row % (num_rows // self._num_shards))
        # Wait until a quarter of the slots is free: a prefill for each free slot costs more.
        num_responses = min(len(self._waiting), len(free) * group)
        if num_responses < min(batch // 4, len(self._waiting)):
            return
        while free and self._waiting:
            self._prefill_some(free)

    def _prefill_some(self, free: list[int]) -> None:
        """Prefills as many prompts as one program may have; takes their rows from the free ones."""
        num_rows, group, batch = *self._arrangement, self._arrangement.batch
        rows: dict[bytes, int] = {}  # a prompt that several responses share is prefilled once
        # Limits the memory of the prompts' states and experts, counted in 32 bits.
        num_values = len(self._prompt_states.layers) * self._policy.config.hidden_size
        num_values += math.prod(_routing_shape(self._policy, self._call.routed_experts)[0])
        num_bytes = 4 * self._prompt_columns * num_values
        max_prompts = MAX_PREFILL_TOKENS // self._prompt_columns
        if num_bytes:
            max_prompts = min(max_prompts, MAX_PROMPT_STATE_BYTES // num_bytes)
        max_prompts = max(max_prompts, 1)
        source = np.full(num_rows, -1, np.int32)
        begins = np.zeros(batch, bool)
        keys = np.zeros((batch, 2), np.uint32)
        while free and self._waiting:
            prompt = self._waiting[0].prompt
            if prompt not in rows and len(rows) == max_prompts:
                break
            row = free.pop(0)
            source[row] = rows.setdefault(prompt, len(rows))
            for slot in range(row * group, (row + 1) * group):
                if not self._waiting or self._waiting[0].prompt != prompt:
                    break
                response = self._running[slot] = self._waiting.popleft()
                begins[slot], keys[slot] = True, _key(response.request)
                response.matcher = self._new_matcher() if self._new_matcher else None
        # On accelerators a few rows cost little, and each number of rows compiles for seconds.
        least = num_rows // 4 if self._policy.tokens_per_read > 1 else 0
        num_rows = next_power_of_two(max(len(rows), min(max(least, MIN_BATCH), max_prompts)))
        token_ids = np.zeros((num_rows, self._prompt_columns), np.int32)
        segment_ids = np.zeros((num_rows, self._prompt_columns), np.int32)
        for row, prompt in enumerate(rows):
            prompt_ids = np.frombuffer(prompt, np.int32)
            token_ids[row, -len(prompt_ids) :] = prompt_ids
            segment_ids[row, -len(prompt_ids) :] = 1
        # A padding row has one token, because the softmax over no token is not finite.
        segment_ids[len(rows) :, -1] = 1
        self._slots, prompt_states, experts = prefill_and_insert(
            self._params,
            self._slots,
            token_ids,
            segment_ids,
            keys,
            source,
            begins,
            policy=self._policy,
            prompt_states=self._prompt_states,
            routed=self._call.routed_experts,
        )
        if self._call.routed_experts:
            experts = jax.device_get(experts)
            for slot in np.flatnonzero(begins):
                response = self._running[slot]
                num_prompt = len(response.request.prompt_ids)
                response.prompt_experts = experts[source[slot // group], -num_prompt:]
        self._count([np.frombuffer(prompt, np.int32) for prompt in rows], np.repeat(source, group))
        if self._call.prompt_logprobs:  # its states are not asked for
            logprobs = jax.device_get(
                prompt_logprobs(self._params, prompt_states, token_ids, policy=self._policy)
            )
            for slot in np.flatnonzero(begins):
                num_prompt = len(self._running[slot].request.prompt_ids)
                self._running[slot].prompt_logprobs = logprobs[source[slot // group], -num_prompt:]
        elif prompt_states.size:
            states = jax.device_get(prompt_states)
            for slot in np.flatnonzero(begins):
                response = self._running[slot]
                num_prompt = len(response.request.prompt_ids)
                response.prompt_states = states[source[slot // group], -num_prompt:]

    def _count(self, prompts: Sequence[np.ndarray], source: Int[np.ndarray, " B"]) -> None:
        """`count_prompts`, if tokens are counted."""
        if self._slots.counts is None:
            return
        shape = next_power_of_two(len(prompts)), prompt_columns(max(map(len, prompts)))
        token_ids = np.full(shape, self._policy.config.vocab_size, np.int32)
        for row, prompt_ids in enumerate(prompts):
            token_ids[row, : len(prompt_ids)] = prompt_ids
        self._slots = count_prompts(self._slots, token_ids, source, mesh=self._policy.mesh)

    def _resize(self) -> None:
        """Widens the cache if the next chunk needs it; drops idle slots if no prompt waits."""
        longest = max((response.num_tokens for response in self._running if response), default=0)
        longest += self._first_column
        columns = self._columns_for(longest + self._chunk)
        if columns < self._response_columns < 2 * columns:
            columns = self._response_columns
        now = cheapest = self._arrangement
        if not self._waiting:
            shards = self._running_by_prompt()
            responses = [list(map(len, slots)) for slots in shards]
            cheapest = self._cheapest(responses, now.group)
            # Shrink only if a step then takes about half as long: each size compiles for seconds.
            if self._cost(cheapest) > SHRINK * self._cost(now):
                cheapest = now
        if columns == self._response_columns and cheapest == now:
            return
        num_slots, num_rows = now.batch // self._num_shards, now.rows // self._num_shards
        kept = np.arange(num_slots) + np.zeros((self._num_shards, 1), int)
        kept_rows = np.arange(num_rows) + np.zeros((self._num_shards, 1), int)
        if cheapest != now:
            self._keep_ended()
            rows = cheapest.rows // self._num_shards
            kept = np.full((self._num_shards, rows, cheapest.group), now.batch)
            kept_rows = np.full((self._num_shards, rows), now.rows)
            for shard, of_prompts in enumerate(shards):
                pieces = [
                    slots[start : start + cheapest.group]
                    for slots in of_prompts
                    for start in range(0, len(slots), cheapest.group)
                ]
                for row, piece in enumerate(pieces):
                    kept[shard, row, : len(piece)] = piece
                    kept_rows[shard, row] = piece[0] // now.group
        running = np.array([*self._running, None], object).reshape(-1)
        places = kept + num_slots * np.arange(self._num_shards).reshape(-1, *[1] * (kept.ndim - 1))
        self._running = running[np.minimum(places, now.batch)].reshape(-1).tolist()
        first_column = None
        if columns != self._response_columns:
            first_column = (self._next_column - longest) % self._response_columns
            self._next_column = longest % columns
        self._slots = resize_slots(
            self._slots,
            kept.reshape(-1).astype(np.int32),
            kept_rows.reshape(-1).astype(np.int32),
            np.int32(first_column) if first_column else None,
            columns=columns,
            mesh=self._policy.mesh,
        )
        self._arrangement, self._response_columns = cheapest, columns

    def _running_by_prompt(self) -> list[list[list[int]]]:
        """The running slots by data shard, then by prompt; counted from the shard's first one."""
        found = []
        for shard in np.array_split(np.arange(len(self._running)), self._num_shards):
            slots = collections.defaultdict(list)
            for slot in shard:
                if response := self._running[slot]:
                    slots[response.prompt].append(int(slot - shard[0]))
            found.append(list(slots.values()))
        return found

    def _cheapest(self, responses: Sequence[Sequence[int]], group: int) -> _Arrangement:
        """The arrangement that costs least: rows of `group` slots, of a shard's part, or of one.

        Each other arrangement would compile for seconds. `responses` has the number of running
        ones to each prompt, by data shard, or in one list, to be divided among the shards.
        """
        found = []
        for size in dict.fromkeys((group, max(group // self._num_shards, 1), 1)):
            needed = max(sum(-(-count // size) for count in shard) for shard in responses)
            needed = -(-needed * len(responses) // self._num_shards)
            smallest = max(MIN_BATCH // (self._num_shards * size), 1)
            rows = next_size(needed, smallest)
            found.append(_Arrangement(self._num_shards * rows, size))
        return min(found, key=self._cost)

    def _cost(self, arrangement: _Arrangement) -> float:
        """Time of a decoding step, in columns of a cache that are read."""
        tokens = max(arrangement.batch, self._policy.tokens_per_read * self._num_shards)
        cached = arrangement.batch * self._response_columns
        cached += arrangement.rows * self._prompt_columns
        return tokens * self._policy.layer_columns + cached

    def _columns_for(self, num_tokens: int) -> int:
        """The least number of columns with room: 128, 192, 256, ... or the token limit."""
        columns = next_size(num_tokens, FIRST_RESPONSE_COLUMNS)
        return columns if self._first_column else min(columns, self._call.sampling.max_tokens)

    def _collect(self, chunk: Chunk) -> list[Rollout]:
        """Adds a chunk to the running responses; returns and removes those that ended."""
        chunk, generated, active = jax.device_get(
            (chunk, self._slots.num_generated, self._slots.active)
        )
        ended = []
        for slot, response in enumerate(self._running):
            if response is None:
                continue
            num_new = int(generated[slot]) - response.num_tokens
            is_stopped = False
            if response.matcher:
                num_kept = response.matcher.feed(chunk.token_ids[slot, :num_new].tolist())
                is_stopped, num_new = num_kept is not None, num_kept or num_new
            own = Chunk(*(array[slot, :num_new] for array in chunk))
            # Copies: views would hold the states of all slots until the longest response ends.
            large = {name: getattr(own, name).copy() for name in ("hidden_states", "experts")}
            response.pieces.append(own._replace(**large))
            response.num_tokens += num_new
            if self._call.on_tokens:
                ids = response.pieces[-1][0].tolist()
                self._call.on_tokens(response.request.sample_id, ids)
            if is_stopped or not active[slot]:
                self._running[slot] = None
                if self._keeps:
                    self._ended.append((slot, response))
                last_token = int(chunk.token_ids[slot, num_new - 1])
                ended.append(self._rollout(response, self._finish_reason(last_token, is_stopped)))
        is_running = np.array([response is not None for response in self._running])
        if (active & ~is_running).any():
            kept = jax.device_put(active & is_running, self._slots.active.sharding)
            self._slots = self._slots._replace(active=kept)
        return ended

    def _keep_ended(self) -> None:
        """Copies the caches of responses that have ended since the last time."""
        ended, self._ended = self._ended, []
        if not ended:
            return
        group = self._arrangement.group
        row_of = {row: i for i, row in enumerate({slot // group: None for slot, _ in ended})}
        # Powers of two: each size compiles, here and where a later call begins with it.
        rows = np.full(next_power_of_two(len(row_of)), self._arrangement.rows, np.int32)
        rows[: len(row_of)] = list(row_of)
        num_slots = max(next_power_of_two(len(ended)), MIN_BATCH)
        slots = np.full(num_slots, self._arrangement.batch, np.int32)
        starts, ends = np.zeros((2, len(slots)), np.int32)
        for i, (slot, response) in enumerate(ended):
            slots[i], starts[i], ends[i] = slot, response.num_shared, len(response.token_ids)
        longest = max(next_power_of_two(int((ends - starts).max())), FIRST_RESPONSE_COLUMNS)
        piece = keep(
            self._slots.prompts,
            self._slots.cache,
            rows,
            slots,
            starts,
            ends,
            columns=min(longest, self._response_columns),
            mesh=self._policy.mesh,
        )
        for i, (slot, response) in enumerate(ended):
            self.kept[response.request.sample_id] = Kept(
                piece,
                row_of[slot // group],
                i,
                response.token_ids,
                response.num_shared,
                response.experts,
            )

    def _finish_reason(self, last_token: int, is_stopped: bool) -> FinishReason:
        if last_token in self._call.sampling.eos_token_ids:
            return "eos"
        is_stopped |= last_token in self._call.sampling.stop_token_ids
        return "stop" if is_stopped else "length"

    def _rollout(self, response: _Response, reason: FinishReason) -> Rollout:
        request, version = response.request, self._call.version

        def no_states(asked: HiddenStateParams):
            shape = 0, len(asked.layers), self._policy.config.hidden_size
            return np.zeros(shape, jnp.dtype(asked.dtype))

        no_values = np.zeros(0, np.float32)
        shape, dtype = _routing_shape(self._policy, self._call.routed_experts)
        no_experts = np.zeros((0, *shape), dtype)
        empty = (np.zeros(0, np.int32), no_values, no_values, no_values)
        empty += (no_states(self._response_states), no_experts)
        token_ids, logprobs, raw_logprobs, entropies, states, _ = (
            np.concatenate(parts) for parts in zip(empty, *response.pieces)
        )
        routed = response.experts if len(token_ids) else no_experts
        prompt_states = response.prompt_states
        if prompt_states is None or not len(token_ids):  # not asked for, or aborted too early
            prompt_states = no_states(self._prompt_states)
        return Rollout(
            **request.rollout_fields,
            response_ids=token_ids,
            rollout_logprobs=logprobs,
            rollout_raw_logprobs=raw_logprobs,
            entropies=entropies if self._call.entropies else None,
            finish_reason=reason,
            versions=(VersionSpan(version, 0, len(token_ids)),) if len(token_ids) else (),
            hidden_states=states if self._response_states.layers else None,
            prompt_states=prompt_states if self._sends_prompt_states else None,
            prompt_logprobs=response.prompt_logprobs,
            routed_experts=routed[:-1] if self._call.routed_experts else None,
            layers=self._call.hidden_states.layers,
            generate_s=time.monotonic() - self._started,
        )
