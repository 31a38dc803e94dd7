"""Batched decoding of one call: jitted programs on fixed shapes, scheduled by a host loop.

A call holds its requests in slots. Every turn admits waiting prompts to free slots (one prefill),
decodes at most `chunk` tokens in every slot (one while loop that ends early when all are done) and
harvests finished responses. When nothing waits, the live slots move to a batch of half the size, so
finished responses stop costing. All of it depends on the call's contents and on sampled lengths
alone, never on time.

On the policy's mesh the slots are split over the data axes, heads and the vocabulary over `tensor`.
A slot stays on its devices for as long as its response lasts.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from semrl_jax.models import DATA_AXES, KVCache, Params, Policy
from semrl_jax.models.sharding import activation_spec
from semrl_jax.rollout.engines.sampling import (
    SamplingKind,
    SamplingValues,
    sample_tokens,
    split_sampling,
)
from semrl_jax.types import (
    FinishReason,
    HiddenStateParams,
    Rollout,
    SampleRequest,
    SamplingParams,
    VersionSpan,
    WeightVersion,
)

MIN_BATCH = 8
MAX_PROMPT_STATE_BYTES = 2**30  # on the device, of the prompts of one turn
FIRST_RESPONSE_COLUMNS = 64
MIN_END_TOKENS = 8  # places for them; more are padded to a power of two
MAX_PROGRAMS = 512  # compiled ones this process keeps; some MB each


class Slots(NamedTuple):
    """Device state of B responses in progress; the cache has P prompt columns, then responses."""

    cache: KVCache
    final_states: Float[Array, "B D"]  # wait for their logits: the next token comes from them
    layer_inputs: Float[Array, "L B D"]  # of the same token, for the inner layers asked for
    num_prompt: Int[Array, " B"]
    num_generated: Int[Array, " B"]
    keys: UInt32[Array, "B 2"]
    active: Bool[Array, " B"]


class Chunk(NamedTuple):
    """What one turn sampled; entries past a response's end are garbage."""

    token_ids: Int[Array, "B C"]
    logprobs: Float[Array, "B C"]
    raw_logprobs: Float[Array, "B C"]
    hidden_states: Float[Array, "B C L D"]


def _layers_of(kind: str, params: HiddenStateParams) -> tuple[int, ...]:
    """Layers whose states of this kind are asked for."""
    return params.layers if kind in params.kinds else ()


def power_of_two(value: int, minimum: int = MIN_BATCH) -> int:
    """The smallest power of two that is at least `value` and `minimum`."""
    return max(minimum, 1 << max(value - 1, 0).bit_length())


def slot_specs(slots: Slots, mesh: Mesh) -> Slots:
    """How the mesh splits the slots, whose number is a multiple of its data shards."""
    rows, by_layer = PartitionSpec(DATA_AXES), PartitionSpec(None, DATA_AXES)
    heads = activation_spec("cache", slots.cache.keys.shape, mesh)
    return Slots(
        cache=KVCache(heads, heads, rows),
        final_states=rows,
        layer_inputs=by_layer,
        num_prompt=rows,
        num_generated=rows,
        keys=rows,
        active=rows,
    )


def _laid_out(slots: Slots, mesh: Mesh | None) -> Slots:
    """What every program begins and ends with, so that donated slots are written in place."""
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
    """B free slots; each device makes its own part."""
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
    return _laid_out(slots, policy.mesh)


@functools.partial(jax.jit, static_argnames=("policy", "prompt_states"), donate_argnames="slots")
def admit(
    params: Params,
    slots: Slots,
    token_ids: Int[Array, "R P"],
    segment_ids: Int[Array, "R P"],
    keys: UInt32[Array, "R 2"],
    rows: Int[Array, " R"],
    *,
    policy: Policy,
    prompt_states: HiddenStateParams,
) -> tuple[Slots, Float[Array, "R P K D"]]:
    """Prefills left-padded prompts into slots `rows`; rows beyond the batch are padding.

    Returns:
      The slots, and the prompts' states in the K layers that `prompt_states` has.
    """
    positions = jnp.maximum(jnp.cumsum(segment_ids, axis=1) - 1, 0)
    final_states, layer_inputs, prompt, all_states = policy.prefill(
        params, token_ids, positions, segment_ids, prompt_states.layers
    )
    num_prompt_columns = token_ids.shape[1]

    def put(target, value):
        return target.at[rows].set(value, mode="drop")

    cache = slots.cache
    admitted = Slots(
        cache=KVCache(
            cache.keys.at[:, rows, :num_prompt_columns].set(prompt.keys, mode="drop"),
            cache.values.at[:, rows, :num_prompt_columns].set(prompt.values, mode="drop"),
            # The response columns of the slot's previous owner are forgotten.
            put(
                cache.positions,
                jnp.pad(
                    prompt.positions,
                    ((0, 0), (0, cache.positions.shape[1] - num_prompt_columns)),
                    constant_values=-1,
                ),
            ),
        ),
        final_states=put(slots.final_states, final_states),
        layer_inputs=slots.layer_inputs.at[:, rows].set(layer_inputs, mode="drop"),
        num_prompt=put(slots.num_prompt, jnp.sum(segment_ids, axis=1)),
        num_generated=put(slots.num_generated, 0),
        keys=put(slots.keys, keys),
        active=put(slots.active, True),
    )
    return _laid_out(admitted, policy.mesh), all_states.astype(jnp.dtype(prompt_states.dtype))


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
    ends: Int[Array, " E"],
    *,
    policy: Policy,
    kind: SamplingKind,
    hidden_states: HiddenStateParams,
    num_prompt_columns: int,
    num_tokens: int,
) -> tuple[Slots, Chunk]:
    """Samples up to `num_tokens` tokens in every active slot.

    A response ends with one of the tokens `ends`, where -1 is no token, or after `max_tokens`.
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

    def step(carry):
        index, slots, chunk = carry
        logits = policy.logits(params, slots.final_states)
        tokens, logprobs, raw_logprobs = _sampled(logits, slots, sampling, kind, policy.mesh)
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
        ended = jnp.any(tokens[:, None] == ends[None, :], axis=1)
        num_generated = jnp.where(slots.active, slots.num_generated + 1, slots.num_generated)
        active = slots.active & ~ended & (num_generated < max_tokens)
        final_states, layer_inputs, cache = policy.decode(
            params,
            tokens,
            slots.num_prompt + slots.num_generated,
            # A finished slot writes its last column again; its cache is dead.
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
        step,
        (jnp.int32(0), slots, chunk),
    )
    return _laid_out(slots, policy.mesh), chunk


def _sampled(
    logits: Float[Array, "B V"],
    slots: Slots,
    sampling: SamplingValues,
    kind: SamplingKind,
    mesh: Mesh | None,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """`sample_tokens`, each device with a slice of the vocabulary, or with some of the rows."""
    draw = functools.partial(sample_tokens, kind=kind)
    if mesh is None or mesh.shape["tensor"] == 1 or kind != "truncated":
        return draw(logits, slots.keys, slots.num_generated, sampling)
    # A sorted row cannot be split. Few rows are sorted by all devices of `tensor` alike.
    fits = logits.shape[0] % mesh.size == 0
    rows = PartitionSpec((*DATA_AXES, "tensor") if fits else DATA_AXES)
    by_slot = NamedSharding(mesh, PartitionSpec(DATA_AXES))

    def bounded(arrays):  # or the compiler splits the rows of other computations so, too
        return jax.lax.with_sharding_constraint(arrays, by_slot)

    return bounded(
        jax.shard_map(
            draw, mesh=mesh, in_specs=(rows, rows, rows, PartitionSpec()), out_specs=rows
        )(logits, *bounded((slots.keys, slots.num_generated)), sampling)
    )


@functools.partial(jax.jit, static_argnames=("mesh", "columns"))
def reshape_slots(
    slots: Slots, rows: Int[Array, " R"], *, columns: int, mesh: Mesh | None = None
) -> Slots:
    """Slots `rows` (beyond the batch: free slots), with a cache of `columns` columns.

    On a mesh `rows` has one part for each data shard, and counts from the shard's first slot.
    """
    of_shard = functools.partial(_reshaped, columns=columns)
    if mesh is None:
        return of_shard(slots, rows)
    specs = slot_specs(slots, mesh)
    # By hand: the compiler would bring every slot to every device to look one up.
    return jax.shard_map(
        of_shard, mesh=mesh, in_specs=(specs, PartitionSpec(DATA_AXES)), out_specs=specs
    )(slots, rows)


def _reshaped(slots: Slots, rows: Int[Array, " R"], *, columns: int) -> Slots:
    """`reshape_slots` of one data shard."""
    cache = slots.cache
    grown = columns - cache.positions.shape[1]
    wide = ((0, 0), (0, 0), (0, grown), (0, 0), (0, 0))
    take = functools.partial(jnp.take, indices=rows, mode="fill", fill_value=0)
    return Slots(
        cache=KVCache(
            jnp.pad(take(cache.keys, axis=1), wide),
            jnp.pad(take(cache.values, axis=1), wide),
            jnp.pad(
                jnp.take(cache.positions, rows, axis=0, mode="fill", fill_value=-1),
                ((0, 0), (0, grown)),
                constant_values=-1,
            ),
        ),
        final_states=take(slots.final_states, axis=0),
        layer_inputs=take(slots.layer_inputs, axis=1),
        num_prompt=take(slots.num_prompt, axis=0),
        num_generated=take(slots.num_generated, axis=0),
        keys=take(slots.keys, axis=0),
        active=take(slots.active, axis=0),
    )


_JITTED = (empty_slots, admit, decode_chunk, reshape_slots)


def _bound_programs() -> None:
    """Drops all compiled programs once there are too many; those still used are compiled again.

    What a call asks for (limits, layers, sizes) decides which programs it needs, so without this a
    client could fill the memory with them.
    """
    if sum(function._cache_size() for function in _JITTED) > MAX_PROGRAMS:
        for function in _JITTED:
            function.clear_cache()


@dataclasses.dataclass
class _Response:
    """One response in progress, on the host."""

    request: SampleRequest
    pieces: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)
    prompt_states: np.ndarray | None = None  # [P, K, D], where asked for


class DecodingCall:
    """One Generate call on the JAX engine. `turn` until `done`; not thread-safe."""

    def __init__(
        self,
        policy: Policy,
        params: Params,
        requests: Sequence[SampleRequest],
        sampling: SamplingParams,
        hidden_states: HiddenStateParams,
        version: WeightVersion,
        *,
        max_batch: int,
        chunk: int,
    ):
        _bound_programs()
        self._policy = policy
        self._params = params
        self._sampling = sampling
        self._hidden_states = hidden_states
        # Calls that want none share one program, whatever else they want.
        self._prompt_states, self._response_states = (
            HiddenStateParams(_layers_of(kind, hidden_states), hidden_states.dtype)
            for kind in ("prefill", "decode")
        )
        self._version = version
        self._chunk = chunk
        self._started = time.monotonic()
        self._waiting = collections.deque(requests)
        self._prompt_columns = power_of_two(max(len(r.prompt_ids) for r in requests))
        shape = {} if policy.mesh is None else policy.mesh.shape
        self._num_shards = math.prod(shape.get(axis, 1) for axis in DATA_AXES)
        smallest = max(MIN_BATCH, self._num_shards)
        self._batch = min(power_of_two(n, smallest) for n in (max_batch, len(requests)))
        self._columns = self._prompt_columns + min(FIRST_RESPONSE_COLUMNS, sampling.max_tokens)
        self._owners: list[_Response | None] = [None] * self._batch
        self._slots = empty_slots(policy=policy, batch=self._batch, columns=self._columns)
        self._kind, self._values = split_sampling(sampling)
        ends = sorted({*sampling.eos_token_ids, *sampling.stop_token_ids})
        self._ends = np.full(power_of_two(len(ends), MIN_END_TOKENS), -1, np.int32)
        self._ends[: len(ends)] = ends

    @property
    def done(self) -> bool:
        return not self._waiting and not any(self._owners)

    def turn(self) -> list[Rollout]:
        """Admits, decodes one chunk, and returns the responses that finished, in slot order."""
        self._admit()
        self._fit()
        self._slots, chunk = decode_chunk(
            self._params,
            self._slots,
            np.int32(self._sampling.max_tokens),
            self._values,
            self._ends,
            policy=self._policy,
            kind=self._kind,
            hidden_states=self._response_states,
            num_prompt_columns=self._prompt_columns,
            num_tokens=self._chunk,
        )
        return self._harvest(chunk)

    def abort(self) -> list[Rollout]:
        """Ends everything; what was sampled so far comes back as "aborted"."""
        rest = [owner for owner in self._owners if owner] + [
            _Response(request) for request in self._waiting
        ]
        self._owners = [None] * self._batch
        self._waiting.clear()
        return [self._finish(response, "aborted") for response in rest]

    def _admit(self) -> None:
        free = [slot for slot, owner in enumerate(self._owners) if owner is None]
        # In turn over the data shards: the batch is halved once all of them have room.
        free.sort(key=lambda slot: slot % (self._batch // self._num_shards))
        # A quarter of the batch at a time: a prefill for every single free slot costs more.
        wanted = min(len(self._waiting), len(free))
        if not wanted or (wanted < self._batch // 4 and wanted < len(self._waiting)):
            return
        wanted = min(wanted, self._max_prompts_at_once())
        size = power_of_two(wanted)
        token_ids = np.zeros((size, self._prompt_columns), np.int32)
        segment_ids = np.zeros((size, self._prompt_columns), np.int32)
        keys = np.zeros((size, 2), np.uint32)
        rows = np.full(size, self._batch, np.int32)
        for index in range(wanted):
            request = self._waiting.popleft()
            rows[index] = slot = free[index]
            token_ids[index, -len(request.prompt_ids) :] = request.prompt_ids
            segment_ids[index, -len(request.prompt_ids) :] = 1
            keys[index] = request.seed >> 32, request.seed & 0xFFFFFFFF
            self._owners[slot] = _Response(request)
        # A padding row attends to one token, so that its softmax has something to sum.
        segment_ids[wanted:, -1] = 1
        self._slots, prompt_states = admit(
            self._params,
            self._slots,
            token_ids,
            segment_ids,
            keys,
            rows,
            policy=self._policy,
            prompt_states=self._prompt_states,
        )
        if prompt_states.size:
            for slot, states in zip(rows[:wanted], jax.device_get(prompt_states)):
                owner = self._owners[slot]
                owner.prompt_states = states[-len(owner.request.prompt_ids) :].copy()

    def _max_prompts_at_once(self) -> int:
        """All of them, but for the memory of the states asked for, in float32 at worst."""
        num_layers = len(self._prompt_states.layers)
        num_bytes = 4 * self._prompt_columns * self._policy.config.hidden_size * num_layers
        return max(MAX_PROMPT_STATE_BYTES // num_bytes, 1) if num_layers else self._batch

    def _fit(self) -> None:
        """Widens the cache where the next chunk needs it; halves the batch where slots idle."""
        shards = np.array_split(np.arange(self._batch), self._num_shards)
        live = [[slot for slot in shard if self._owners[slot]] for shard in shards]
        generated = max((len_of(owner) for owner in self._owners if owner), default=0)
        columns = self._columns
        response_columns = min(generated + self._chunk, self._sampling.max_tokens)
        while columns < self._prompt_columns + response_columns:
            columns = self._prompt_columns + min(
                2 * (columns - self._prompt_columns), self._sampling.max_tokens
            )
        batch = self._batch
        if not self._waiting:
            smallest = max(MIN_BATCH // self._num_shards, 1)
            batch = self._num_shards * power_of_two(max(map(len, live)), smallest)
        if columns == self._columns and batch == self._batch:
            return
        if batch == self._batch:
            live = shards
        rows = np.full((self._num_shards, batch // self._num_shards), self._batch, np.int32)
        owners = np.full(rows.shape, None, object)
        for index, (shard, kept) in enumerate(zip(shards, live)):
            rows[index, : len(kept)] = np.array(kept, np.int32) - shard[0]
            owners[index, : len(kept)] = [self._owners[slot] for slot in kept]
        self._owners = owners.reshape(-1).tolist()
        self._slots = reshape_slots(
            self._slots, rows.reshape(-1), columns=columns, mesh=self._policy.mesh
        )
        self._batch, self._columns = batch, columns

    def _harvest(self, chunk: Chunk) -> list[Rollout]:
        token_ids, logprobs, raw_logprobs, states, generated, active = jax.device_get(
            (*chunk, self._slots.num_generated, self._slots.active)
        )
        finished = []
        for slot, owner in enumerate(self._owners):
            if owner is None:
                continue
            new = int(generated[slot]) - len_of(owner)
            owner.pieces.append(
                tuple(array[slot, :new] for array in (token_ids, logprobs, raw_logprobs, states))
            )
            if not active[slot]:
                self._owners[slot] = None
                last = int(token_ids[slot, new - 1])
                finished.append(self._finish(owner, self._reason(last)))
        return finished

    def _reason(self, last_token: int) -> FinishReason:
        if last_token in self._sampling.eos_token_ids:
            return "eos"
        return "stop" if last_token in self._sampling.stop_token_ids else "length"

    def _finish(self, response: _Response, reason: FinishReason) -> Rollout:
        def no_states(kind):
            shape = 0, len(_layers_of(kind, self._hidden_states)), self._policy.config.hidden_size
            return np.zeros(shape, jnp.dtype(self._hidden_states.dtype))

        empty = (
            np.zeros(0, np.int32),
            np.zeros(0, np.float32),
            np.zeros(0, np.float32),
            no_states("decode"),
        )
        token_ids, logprobs, raw_logprobs, states = (
            np.concatenate(parts) for parts in zip(empty, *response.pieces)
        )
        prompt_states = response.prompt_states
        if prompt_states is None or not len(token_ids):  # aborted before its first token
            prompt_states = no_states("prefill")
        request, asked = response.request, self._hidden_states
        return Rollout(
            sample_id=request.sample_id,
            group_id=request.group_id,
            sample_index=request.sample_index,
            prompt_ids=request.prompt_ids,
            response_ids=token_ids,
            rollout_logprobs=logprobs,
            rollout_raw_logprobs=raw_logprobs,
            finish_reason=reason,
            versions=(VersionSpan(self._version, 0, len(token_ids)),) if len(token_ids) else (),
            hidden_states=states if _layers_of("decode", asked) else None,
            prompt_states=prompt_states if _layers_of("prefill", asked) else None,
            layers=asked.layers,
            generate_s=time.monotonic() - self._started,
        )


def len_of(response: _Response) -> int:
    """Tokens sampled so far."""
    return sum(len(piece[0]) for piece in response.pieces)
