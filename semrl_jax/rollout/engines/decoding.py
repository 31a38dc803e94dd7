"""Batched decoding of one Generate call: jitted programs of fixed shapes, run by a host loop.

Each slot of the batch holds the KV cache of one response. Every step of the loop

1. prefills waiting prompts and inserts them into free slots (`prefill_and_insert`),
2. resizes the slots (`resize_slots`): the cache grows with the longest response, and once no prompt
   waits the batch shrinks with the number of running responses,
3. generates up to `chunk` tokens in every slot (`decode_chunk`), and
4. collects the responses that have ended, which frees their slots. Stop strings are found here:
   tokens that were sampled after one are dropped, and the slot is made inactive.

The schedule depends on the requests and on the sampled lengths only, never on time.

On the policy's mesh, slots are split over the data axes, heads and vocabulary over `tensor`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from semrl_jax.data import StopMatcher
from semrl_jax.models import DATA_AXES, KVCache, Params, Policy
from semrl_jax.models.sharding import activation_spec
from semrl_jax.rollout.engines.sampling import (
    SamplingKind,
    SamplingValues,
    block_size,
    sample_tokens,
    split_sampling,
)
from semrl_jax.rollout.wire.codec import GenerateCall
from semrl_jax.rounding import next_power_of_two
from semrl_jax.types import FinishReason, HiddenStateParams, Rollout, SampleRequest, VersionSpan

MIN_BATCH = 8  # slots, and rows of a prefill
MIN_PROMPT_COLUMNS = 8  # of the cache
MAX_PROMPT_STATE_BYTES = 2**30  # of prompt states on the device, per prefill
FIRST_RESPONSE_COLUMNS = 64  # of the cache; doubled when the responses need more
MIN_END_TOKENS = 8  # smallest padded number of end tokens
MAX_PROGRAMS = 512  # compiled programs that this process keeps; some MB each


class Slots(NamedTuple):
    """The device state of B slots. The cache has P prompt columns, then response columns."""

    cache: KVCache
    final_states: Float[Array, "B D"]  # of the last token; the next token is sampled from them
    layer_inputs: Float[Array, "L B D"]  # of the same token; states of inner layers
    num_prompt: Int[Array, " B"]
    num_generated: Int[Array, " B"]
    keys: UInt32[Array, "B 2"]
    active: Bool[Array, " B"]


# The axis of the slots in each array.
_SLOT_AXES = Slots(KVCache(1, 1, 0), 0, 1, 0, 0, 0, 0)


class Chunk(NamedTuple):
    """The tokens that `decode_chunk` sampled; entries after a response's end are invalid."""

    token_ids: Int[Array, "B C"]
    logprobs: Float[Array, "B C"]
    raw_logprobs: Float[Array, "B C"]
    hidden_states: Float[Array, "B C L D"]


def slot_specs(slots: Slots, mesh: Mesh) -> Slots:
    """The partition of the slots on the mesh; their number is a multiple of its data shards."""
    specs = jax.tree.map(lambda axis: PartitionSpec(*[None] * axis, DATA_AXES), _SLOT_AXES)
    heads = activation_spec("cache", slots.cache.keys.shape, mesh)
    return specs._replace(cache=KVCache(heads, heads, specs.cache.positions))


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


@functools.partial(jax.jit, static_argnames=("policy", "batch", "columns"))
def empty_slots(*, policy: Policy, batch: int, columns: int) -> Slots:
    """B free slots; each device allocates its own part."""
    config, dtype = policy.config, jnp.dtype(policy.compute_dtype)
    shape = (config.num_layers, batch, columns, config.num_kv_heads, config.head_dim)
    slots = Slots(
        cache=KVCache(
            jnp.zeros(shape, dtype),
            jnp.zeros(shape, dtype),
            jnp.full((batch, columns), -1, jnp.int32),
        ),
        final_states=jnp.zeros((batch, config.hidden_size), dtype),
        layer_inputs=jnp.zeros((config.num_layers, batch, config.hidden_size), dtype),
        num_prompt=jnp.zeros(batch, jnp.int32),
        num_generated=jnp.zeros(batch, jnp.int32),
        keys=jnp.zeros((batch, 2), jnp.uint32),
        active=jnp.zeros(batch, bool),
    )
    return _with_sharding(slots, policy.mesh)


@functools.partial(jax.jit, static_argnames=("policy", "prompt_states"), donate_argnames="slots")
def prefill_and_insert(
    params: Params,
    slots: Slots,
    token_ids: Int[Array, "R P"],
    segment_ids: Int[Array, "R P"],
    keys: UInt32[Array, "R 2"],
    into: Int[Array, " R"],
    *,
    policy: Policy,
    prompt_states: HiddenStateParams,
) -> tuple[Slots, Float[Array, "R P K D"]]:
    """Prefills R left-padded prompts and inserts each into a slot.

    `into` has the slot of each prompt; an index beyond the batch marks a padding row. Also returns
    the prompts' states in the K layers of `prompt_states`.
    """
    positions = jnp.maximum(jnp.cumsum(segment_ids, axis=1) - 1, 0)
    final_states, layer_inputs, prompt, all_states = policy.prefill(
        params, token_ids, positions, segment_ids, prompt_states.layers
    )
    num_prompt_columns = token_ids.shape[1]

    def insert(target, value):
        return target.at[into].set(value, mode="drop")

    cache = slots.cache
    slots = Slots(
        cache=KVCache(
            cache.keys.at[:, into, :num_prompt_columns].set(prompt.keys, mode="drop"),
            cache.values.at[:, into, :num_prompt_columns].set(prompt.values, mode="drop"),
            # Position -1 clears the response columns of the slot's previous response.
            insert(
                cache.positions,
                jnp.pad(
                    prompt.positions,
                    ((0, 0), (0, cache.positions.shape[1] - num_prompt_columns)),
                    constant_values=-1,
                ),
            ),
        ),
        final_states=insert(slots.final_states, final_states),
        layer_inputs=slots.layer_inputs.at[:, into].set(layer_inputs, mode="drop"),
        num_prompt=insert(slots.num_prompt, jnp.sum(segment_ids, axis=1)),
        num_generated=insert(slots.num_generated, 0),
        keys=insert(slots.keys, keys),
        active=insert(slots.active, True),
    )
    return _with_sharding(slots, policy.mesh), all_states.astype(jnp.dtype(prompt_states.dtype))


@functools.partial(
    jax.jit,
    static_argnames=("policy", "kind", "hidden_states", "num_prompt_columns", "num_tokens"),
    donate_argnames="slots",
)
def decode_chunk(
    params: Params,
    slots: Slots,
    max_tokens: Int[Array, ""],
    sampling: SamplingValues,
    end_ids: Int[Array, " E"],
    *,
    policy: Policy,
    kind: SamplingKind,
    hidden_states: HiddenStateParams,
    num_prompt_columns: int,
    num_tokens: int,
) -> tuple[Slots, Chunk]:
    """Generates up to `num_tokens` tokens in every active slot.

    A response ends with one of the tokens `end_ids` (-1 is padding), or after `max_tokens` tokens.
    The loop ends early once no slot is active.
    """
    batch = slots.active.shape[0]
    num_layers, layers = policy.config.num_layers, hidden_states.layers
    state_dtype = jnp.dtype(hidden_states.dtype)
    chunk = Chunk(
        jnp.zeros((batch, num_tokens), jnp.int32),
        jnp.zeros((batch, num_tokens), jnp.float32),
        jnp.zeros((batch, num_tokens), jnp.float32),
        jnp.zeros((batch, num_tokens, len(layers), policy.config.hidden_size), state_dtype),
    )

    def decode_step(carry):
        index, slots, chunk = carry
        logits = policy.logits(params, slots.final_states)
        tokens, logprobs, raw_logprobs = _sample(logits, slots, sampling, kind, policy.mesh)
        states = [
            slots.final_states if layer in (-1, num_layers) else slots.layer_inputs[layer]
            for layer in layers
        ]
        chunk = Chunk(
            chunk.token_ids.at[:, index].set(tokens),
            chunk.logprobs.at[:, index].set(logprobs),
            chunk.raw_logprobs.at[:, index].set(raw_logprobs),
            chunk.hidden_states.at[:, index].set(jnp.stack(states, axis=1).astype(state_dtype))
            if states
            else chunk.hidden_states,
        )
        ended = jnp.any(tokens[:, None] == end_ids[None, :], axis=1)
        num_generated = jnp.where(slots.active, slots.num_generated + 1, slots.num_generated)
        active = slots.active & ~ended & (num_generated < max_tokens)
        final_states, layer_inputs, cache = policy.decode(
            params,
            tokens,
            slots.num_prompt + slots.num_generated,
            # A slot that has ended overwrites its last column, which is not read again.
            jnp.minimum(
                num_prompt_columns + slots.num_generated, slots.cache.positions.shape[1] - 1
            ),
            slots.cache,
        )
        slots = Slots(
            cache, final_states, layer_inputs, slots.num_prompt, num_generated, slots.keys, active
        )
        return index + 1, slots, chunk

    _, slots, chunk = jax.lax.while_loop(
        lambda carry: (carry[0] < num_tokens) & jnp.any(carry[1].active),
        decode_step,
        (jnp.int32(0), slots, chunk),
    )
    return _with_sharding(slots, policy.mesh), chunk


def _sample(
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


@functools.partial(jax.jit, static_argnames=("mesh", "columns"))
def resize_slots(
    slots: Slots, kept: Int[Array, " R"], *, columns: int, mesh: Mesh | None = None
) -> Slots:
    """Gathers R slots and widens their cache to `columns` columns.

    `kept` has indices; one beyond the batch gives a free slot. On a mesh it has equal parts, one
    per data shard, and indices count from the shard's first slot.
    """
    resize_shard = functools.partial(_resize_shard, columns=columns)
    if mesh is None:
        return resize_shard(slots, kept)
    specs = slot_specs(slots, mesh)
    # In a shard_map, because the compiler would gather all slots on every device.
    return jax.shard_map(
        resize_shard, mesh=mesh, in_specs=(specs, PartitionSpec(DATA_AXES)), out_specs=specs
    )(slots, kept)


def _resize_shard(slots: Slots, kept: Int[Array, " R"], *, columns: int) -> Slots:
    """`resize_slots` for one data shard."""
    cache = slots.cache
    grown = columns - cache.positions.shape[1]
    wide = ((0, 0), (0, 0), (0, grown), (0, 0), (0, 0))

    def take(axis, array, fill_value=0):
        return jnp.take(array, kept, axis=axis, mode="fill", fill_value=fill_value)

    taken = jax.tree.map(take, _SLOT_AXES, slots)
    positions = take(0, cache.positions, fill_value=-1)
    return taken._replace(
        cache=KVCache(
            jnp.pad(taken.cache.keys, wide),
            jnp.pad(taken.cache.values, wide),
            jnp.pad(positions, ((0, 0), (0, grown)), constant_values=-1),
        )
    )


_JITTED = (empty_slots, prefill_and_insert, decode_chunk, resize_slots)


def _limit_programs() -> None:
    """Drops all compiled programs once there are too many: clients could fill the memory."""
    if sum(function._cache_size() for function in _JITTED) > MAX_PROGRAMS:
        for function in _JITTED:
            function.clear_cache()


@dataclasses.dataclass
class _Response:
    request: SampleRequest
    # Per chunk: token ids, log-probabilities, raw log-probabilities and hidden states.
    pieces: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)
    prompt_states: np.ndarray | None = None  # [P, K, D], if asked for
    matcher: StopMatcher | None = None  # if the call has stop strings

    @property
    def num_tokens(self) -> int:
        return sum(len(token_ids) for token_ids, *_ in self.pieces)


class DecodingCall:
    """One Generate call on the JAX engine: call `step` until `done`. Not thread-safe.

    Args:
      policy, params: the model; the slots are split over the policy's mesh.
      max_batch: limit on the slots of all devices; rounded up to a power of two.
      chunk: tokens generated per step and slot.
      new_matcher: makes the matcher of a response; None if the call has no stop strings.
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
    ):
        _limit_programs()
        self._policy = policy
        self._params = params
        self._call = call
        asked = call.hidden_states
        # Split by kind: calls without states of one kind then share that kind's programs.
        self._prompt_states, self._response_states = (
            HiddenStateParams(asked.layers if kind in asked.kinds else (), asked.dtype)
            for kind in ("prefill", "decode")
        )
        self._chunk = chunk
        self._new_matcher = new_matcher
        self._started = time.monotonic()
        self._waiting = collections.deque(call.requests)
        longest_prompt = max(len(request.prompt_ids) for request in call.requests)
        self._prompt_columns = max(next_power_of_two(longest_prompt), MIN_PROMPT_COLUMNS)
        shape = {} if policy.mesh is None else policy.mesh.shape
        self._num_shards = math.prod(shape.get(axis, 1) for axis in DATA_AXES)
        num_slots = next_power_of_two(min(max_batch, len(call.requests)))
        self._batch = max(num_slots, MIN_BATCH, self._num_shards)
        self._columns = self._prompt_columns + min(FIRST_RESPONSE_COLUMNS, call.sampling.max_tokens)
        self._running: list[_Response | None] = [None] * self._batch  # by slot
        self._slots = empty_slots(policy=policy, batch=self._batch, columns=self._columns)
        self._kind, self._values = split_sampling(call.sampling)
        end_ids = sorted({*call.sampling.eos_token_ids, *call.sampling.stop_token_ids})
        num_padded = max(next_power_of_two(len(end_ids)), MIN_END_TOKENS)
        self._end_ids = np.full(num_padded, -1, np.int32)
        self._end_ids[: len(end_ids)] = end_ids

    @property
    def done(self) -> bool:
        return not self._waiting and not any(self._running)

    def step(self) -> list[Rollout]:
        """Prefills, generates one chunk, and returns the responses that ended, in slot order."""
        self._prefill()
        self._resize()
        self._slots, chunk = decode_chunk(
            self._params,
            self._slots,
            np.int32(self._call.sampling.max_tokens),
            self._values,
            self._end_ids,
            policy=self._policy,
            kind=self._kind,
            hidden_states=self._response_states,
            num_prompt_columns=self._prompt_columns,
            num_tokens=self._chunk,
        )
        return self._collect(chunk)

    def abort(self) -> list[Rollout]:
        """Ends the call and returns all remaining responses as "aborted", with their tokens."""
        rest = [response for response in self._running if response]
        rest += [_Response(request) for request in self._waiting]
        self._running = [None] * self._batch
        self._waiting.clear()
        return [self._rollout(response, "aborted") for response in rest]

    def _prefill(self) -> None:
        free = [slot for slot, response in enumerate(self._running) if response is None]
        # Alternate between the data shards: the batch shrinks to the fullest of them.
        free.sort(key=lambda slot: slot % (self._batch // self._num_shards))
        # Wait until a quarter of the slots is free: a prefill for each free slot costs more.
        num_prompts = min(len(self._waiting), len(free))
        if not num_prompts or (num_prompts < self._batch // 4 and num_prompts < len(self._waiting)):
            return
        num_prompts = min(num_prompts, self._max_prompts_per_prefill())
        num_rows = max(next_power_of_two(num_prompts), MIN_BATCH)
        token_ids = np.zeros((num_rows, self._prompt_columns), np.int32)
        segment_ids = np.zeros((num_rows, self._prompt_columns), np.int32)
        keys = np.zeros((num_rows, 2), np.uint32)
        into = np.full(num_rows, self._batch, np.int32)
        for index in range(num_prompts):
            request = self._waiting.popleft()
            into[index] = slot = free[index]
            token_ids[index, -len(request.prompt_ids) :] = request.prompt_ids
            segment_ids[index, -len(request.prompt_ids) :] = 1
            keys[index] = request.seed >> 32, request.seed & 0xFFFFFFFF
            matcher = self._new_matcher() if self._new_matcher else None
            self._running[slot] = _Response(request, matcher=matcher)
        # A padding row has one token, because the softmax over no token is not finite.
        segment_ids[num_prompts:, -1] = 1
        self._slots, prompt_states = prefill_and_insert(
            self._params,
            self._slots,
            token_ids,
            segment_ids,
            keys,
            into,
            policy=self._policy,
            prompt_states=self._prompt_states,
        )
        if prompt_states.size:
            for slot, states in zip(into[:num_prompts], jax.device_get(prompt_states)):
                response = self._running[slot]
                response.prompt_states = states[-len(response.request.prompt_ids) :].copy()

    def _max_prompts_per_prefill(self) -> int:
        """Limits the memory of the prompt states, counted in float32."""
        num_layers = len(self._prompt_states.layers)
        num_bytes = 4 * self._prompt_columns * self._policy.config.hidden_size * num_layers
        return max(MAX_PROMPT_STATE_BYTES // num_bytes, 1) if num_layers else self._batch

    def _resize(self) -> None:
        """Widens the cache if the next chunk needs it; drops idle slots if no prompt waits."""
        shards = np.array_split(np.arange(self._batch), self._num_shards)
        busy = [[slot for slot in shard if self._running[slot]] for shard in shards]
        longest = max((response.num_tokens for response in self._running if response), default=0)
        columns = self._columns
        response_columns = min(longest + self._chunk, self._call.sampling.max_tokens)
        while columns < self._prompt_columns + response_columns:
            columns = self._prompt_columns + min(
                2 * (columns - self._prompt_columns), self._call.sampling.max_tokens
            )
        batch = self._batch
        if not self._waiting:
            num_slots = next_power_of_two(max(map(len, busy)))  # per shard
            batch = self._num_shards * max(num_slots, MIN_BATCH // self._num_shards)
        if columns == self._columns and batch == self._batch:
            return
        if batch == self._batch:
            busy = shards  # only the cache grows: every slot stays where it is
        kept = np.full((self._num_shards, batch // self._num_shards), self._batch, np.int32)
        running = np.full(kept.shape, None, object)
        for index, (shard, slots) in enumerate(zip(shards, busy)):
            kept[index, : len(slots)] = np.array(slots, np.int32) - shard[0]
            running[index, : len(slots)] = [self._running[slot] for slot in slots]
        self._running = running.reshape(-1).tolist()
        self._slots = resize_slots(
            self._slots, kept.reshape(-1), columns=columns, mesh=self._policy.mesh
        )
        self._batch, self._columns = batch, columns

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
            response.pieces.append(tuple(array[slot, :num_new] for array in chunk))
            if is_stopped or not active[slot]:
                self._running[slot] = None
                last_token = int(chunk.token_ids[slot, num_new - 1])
                ended.append(self._rollout(response, self._finish_reason(last_token, is_stopped)))
        is_running = np.array([response is not None for response in self._running])
        if (active & ~is_running).any():
            kept = jax.device_put(active & is_running, self._slots.active.sharding)
            self._slots = self._slots._replace(active=kept)
        return ended

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
        empty = (np.zeros(0, np.int32), no_values, no_values, no_states(self._response_states))
        token_ids, logprobs, raw_logprobs, states = (
            np.concatenate(parts) for parts in zip(empty, *response.pieces)
        )
        prompt_states = response.prompt_states
        if prompt_states is None or not len(token_ids):  # not asked for, or aborted too early
            prompt_states = no_states(self._prompt_states)
        return Rollout(
            **request.rollout_fields,
            response_ids=token_ids,
            rollout_logprobs=logprobs,
            rollout_raw_logprobs=raw_logprobs,
            finish_reason=reason,
            versions=(VersionSpan(version, 0, len(token_ids)),) if len(token_ids) else (),
            hidden_states=states if self._response_states.layers else None,
            prompt_states=prompt_states if self._prompt_states.layers else None,
            layers=self._call.hidden_states.layers,
            generate_s=time.monotonic() - self._started,
        )
