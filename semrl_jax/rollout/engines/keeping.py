"""Caches that a call leaves for the next one, so that a turn continues where the last one ended.

A request continues from what an earlier call kept for its sample id, if its prompt begins with all
tokens in there and the weights are the same. Only the tokens after them are computed. All other
requests are prefilled.

The same tokens are rounded differently when they are decoded, added to a cache, or prefilled. So a
response depends on the calls before. Runs still repeat to the bit, by induction over the calls that
an engine gets between two sets of weights:

- What a call keeps and continues follows from its contents and from what was kept before it. Time
  decides nothing. Kept caches end with the weights, and nothing is kept after a start.
- A prompt's first turn never continues anything: what an earlier try kept for its sample id is
  longer than the prompt.
- All calls of an episode come from one `play`, which begins with the first turn (`MultiTurn`). So a
  killed run, or a batch that is sampled again, repeats all calls of its batch. Calls of other
  batches and of evaluations have other sample ids, and are not sent between two calls of a `play`.
  Those of another client can only displace what was kept, beyond the limit below.
- Each process has replicas of its own. With several, a group stays with the one that its first turn
  went to, which follows from the order of the groups. With `rollout.groups_per_call`, where time
  decides which replica gets a call, nothing is kept.

A replica that fails loses what it kept, and its turn is prefilled on another one, or after its
restart. As with single turns without `rollout.groups_per_call`, this changes the rounding.

An engine keeps at most as many responses as it has slots: the oldest calls go first. A call with
more responses than slots, with states of prompts, or on several data shards keeps and continues
nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, UInt

from semrl_jax.models import DATA_AXES, KVCache
from semrl_jax.models.sharding import constrain
from semrl_jax.support.programs import compiled_once
from semrl_jax.types import SampleRequest


class Piece(NamedTuple):
    """Caches of responses that ended together, in the order of tokens, and the rows of prompts."""

    prompts: KVCache
    cache: KVCache


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """The cache of one response."""

    piece: Piece | None  # None once it was used
    row: int  # in the piece
    slot: int
    token_ids: Int[np.ndarray, " T"]  # of all tokens in it
    num_prompt: int  # the number of them in the row of the prompt
    experts: UInt[np.ndarray, "T M K"] | None = None  # they went to; None: nobody asked for them

    @property
    def prompt(self) -> bytes:
        """Equal for caches with equal rows."""
        return self.token_ids[: self.num_prompt].tobytes()

    def begins(self, request: SampleRequest) -> bool:
        """Whether the prompt of the request has all these tokens, and more after them."""
        count = len(self.token_ids)
        return len(request.prompt_ids) > count and np.array_equal(
            request.prompt_ids[:count], self.token_ids
        )


@compiled_once
@functools.partial(jax.jit, static_argnames=("columns", "mesh"))
def keep(
    prompts: KVCache,
    cache: KVCache,
    rows: Int[Array, " r"],
    slots: Int[Array, " n"],
    starts: Int[Array, " n"],
    ends: Int[Array, " n"],
    *,
    columns: int,
    mesh: Mesh | None,
) -> Piece:
    """Copies rows, and positions `starts` to before `ends` of slots; empty beyond the last."""

    def taken(array, indices, empty=0):
        return jnp.take(array, indices, axis=0, mode="fill", fill_value=empty)

    positions = taken(cache.positions, slots, -1)
    is_own = (positions >= starts[:, None]) & (positions < ends[:, None])
    order = jnp.argsort(jnp.where(is_own, positions, jnp.iinfo(jnp.int32).max), axis=1)
    order = order[:, :columns]
    wanted = starts[:, None] + jnp.arange(columns)[None]

    def in_order(array, axis):
        index = order[:, None, None, :] if axis == 3 else order[:, None, :, None]
        return constrain(jnp.take_along_axis(taken(array, slots), index, axis), "cache", mesh)

    return Piece(
        KVCache(
            *(
                tuple(constrain(taken(x, rows), "cache", mesh) for x in layers)
                for layers in prompts[:2]
            ),
            taken(prompts.positions, rows, -1),
        ),
        KVCache(
            tuple(in_order(keys, 3) for keys in cache.keys),
            tuple(in_order(values, 2) for values in cache.values),
            jnp.where(wanted < ends[:, None], wanted, -1),
        ),
    )


@compiled_once
@functools.partial(jax.jit, static_argnames="mesh", donate_argnames=("prompts", "cache"))
def insert(
    prompts: KVCache,
    cache: KVCache,
    piece: Piece,
    rows: Int[Array, " R"],
    slots: Int[Array, " B"],
    *,
    mesh: Mesh | None,
) -> Piece:
    """Puts rows and slots of a piece in place; -1 leaves a row or slot as it is."""

    def chosen(source, old, new):
        new = jnp.take(new, jnp.maximum(source, 0), axis=0)
        new = new[tuple(map(slice, old.shape))]  # there are no tokens in further columns
        empty = -1 if old.ndim == 2 else 0
        padding = [(0, size - present) for size, present in zip(old.shape, new.shape)]
        new = jnp.pad(new, padding, constant_values=empty)
        found = jnp.where((source >= 0).reshape(-1, *[1] * (old.ndim - 1)), new, old)
        if old.ndim == 4 or mesh is None:
            return constrain(found, "cache", mesh)
        return jax.lax.with_sharding_constraint(found, NamedSharding(mesh, P(DATA_AXES)))

    return Piece(
        jax.tree.map(functools.partial(chosen, rows), prompts, piece.prompts),
        jax.tree.map(functools.partial(chosen, slots), cache, piece.cache),
    )
