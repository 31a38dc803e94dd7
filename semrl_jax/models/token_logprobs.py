"""Log-probabilities and entropies of tokens from final states, in tiles of the logits.

The logits [N, V] of a batch never exist. A tile of rows and vocabulary columns is computed, reduced
and dropped, and computed again in the backward pass. Its size follows from where it should stay: in
the cache of a processor, or in few large products on an accelerator. Each part of the output matrix
is read once per block of rows.

Source: arXiv:2410.10989 (fused linear cross entropy) and arXiv:2411.09009 (tiles of the vocabulary
with a running log-sum-exp). Here the gradient also has the part of the entropy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

UNSEEN = -1e30  # logit of a column that another tile has: finite, so that no product is NaN


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the logits are computed; static."""

    vocabulary_axis: int  # of the output matrix: 0 for [V, D] (a tied embedding), 1 for [D, V]
    temperature: float  # divides the logits, > 0
    max_logits: int  # float32 logits of a tile
    axis: str | None = None  # mesh axis over which the vocabulary is split; None: it is not split
    softcap: float | None = None  # c: logits z become c tanh(z / c) before the temperature

    def sizes(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Rows and columns of a tile, at least as wide as high (`benchmarks/logit_tiles.py`)."""
        fewest_columns = min(math.isqrt(self.max_logits), num_columns)
        row_blocks = -(-num_rows * fewest_columns // self.max_logits)
        rows = -(-num_rows // max(row_blocks, 1))
        column_blocks = -(-num_columns // max(self.max_logits // rows, fewest_columns))
        return rows, -(-num_columns // column_blocks)


class Other(NamedTuple):
    """Another distribution over the same tokens: of another model, or of other parameters."""

    states: Float[Array, "N E"]
    matrix: Float[Array, "_ _"]  # as many tokens as the first


class _Columns(NamedTuple):
    """The columns of one tile; the last begins among those before, `num_seen`, not counted."""

    first: Int[Array, ""]
    size: int
    num_seen: Int[Array, ""] | int

    def index_of(self, ids: Int[Array, " R"]) -> tuple[Int[Array, " R"], Bool[Array, " R"]]:
        """Index of each id in the tile, clipped, and whether the tile has it."""
        index = ids - self.first
        inside = (index >= self.num_seen) & (index < self.size)
        return jnp.clip(index, 0, self.size - 1), inside


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 5))
def token_logprobs(
    states: Float[Array, "N D"],
    token_ids: Int[Array, " N"],
    matrix: Float[Array, "_ _"],
    tiles: Tiles,
    other: Other | None = None,
    other_tiles: Tiles | None = None,
) -> tuple[Float[Array, " N"], ...]:
    """Log-probability of each token and entropy of its distribution; float32 nats.

    States and matrix, perhaps a slice of the vocabulary, are in the compute dtype; row n is the
    state whose logits produced token n. Token ids are int32, in the whole vocabulary. With `other`,
    a third value: KL(own || other) of the distributions, without a gradient for `other`;
    `other_tiles` has its axis of the vocabulary and its cap of the logits.
    """
    return _forward(states, token_ids, matrix, tiles, other, other_tiles)[0]


def _forward(states, token_ids, matrix, tiles, other, other_tiles):
    ids = _own_ids(token_ids, matrix, tiles)

    def of_rows(block):
        states, ids, *other_states = block

        def add(sums, columns):
            peak, total, weighted, chosen, *of_other = sums
            logits = _logits(states, matrix, columns, tiles)
            new_peak = jnp.maximum(peak, jnp.max(logits, axis=1))
            scale = jnp.exp(peak - new_peak)
            weights = jnp.exp(logits - new_peak[:, None])
            index, inside = columns.index_of(ids)
            here = jnp.take_along_axis(logits, index[:, None], axis=1)[:, 0]
            if of_other:
                other_peak, other_total, cross = of_other
                logits_of_other = _logits(*other_states, other.matrix, columns, other_tiles)
                top = jnp.maximum(other_peak, jnp.max(logits_of_other, axis=1))
                parts = jnp.sum(jnp.exp(logits_of_other - top[:, None]), axis=1)
                of_other = (
                    top,
                    other_total * jnp.exp(other_peak - top) + parts,
                    cross * scale + jnp.sum(weights * logits_of_other, axis=1),
                )
            return (
                new_peak,
                total * scale + jnp.sum(weights, axis=1),
                weighted * scale + jnp.sum(weights * logits, axis=1),
                jnp.where(inside, here, chosen),
                *of_other,
            )

        zeros = _zeros(ids.shape, states, matrix, *(other or ()))
        start = (zeros + UNSEEN, zeros, zeros, zeros)
        start += (zeros + UNSEEN, zeros, zeros) if other else ()
        return _over_columns(add, start, len(ids), matrix, tiles)

    arrays = (states, ids, other.states) if other else (states, ids)
    peak, total, weighted, chosen, *of_other = _over_rows(of_rows, arrays, matrix, tiles)
    if tiles.axis is not None:
        whole_peak = jax.lax.pmax(peak, tiles.axis)
        scale = jnp.exp(peak - whole_peak)
        if other:
            of_other[2] = jax.lax.psum(of_other[2] * scale, tiles.axis)
        total, weighted, chosen = jax.lax.psum(
            (total * scale, weighted * scale, chosen), tiles.axis
        )
        peak = whole_peak
    log_z = peak + jnp.log(total)
    entropies = log_z - weighted / total
    found, kept = (chosen - log_z, entropies), (states, token_ids, matrix, log_z, entropies)
    if not other:
        return found, (*kept, None)
    top, other_total, cross = of_other
    if tiles.axis is not None:
        whole = jax.lax.pmax(top, tiles.axis)
        other_total = jax.lax.psum(other_total * jnp.exp(top - whole), tiles.axis)
        top = whole
    other_log_z = top + jnp.log(other_total)
    divergences = other_log_z - cross / total - entropies
    return (*found, divergences), (*kept, (other, other_log_z, divergences))


def _backward(tiles, other_tiles, kept, gradients):
    """d log p_y / d z_i = [i = y] - p_i and d H / d z_i = -p_i (log p_i + H), for logits z.

    d KL / d z_i = p_i (log p_i - log q_i - KL), q of the other distribution.
    """
    states, token_ids, matrix, log_z, entropies, of_other = kept
    other, *rest = of_other or (None,)
    ids = _own_ids(token_ids, matrix, tiles)
    contracted = 1 - tiles.vocabulary_axis

    def of_rows(of_matrix, block):
        states, ids, log_z, entropies, of_logprobs, of_entropies, *more = block

        def add(sums, columns):
            of_states, of_matrix = sums
            log_p = _logits(states, matrix, columns, tiles) - log_z[:, None]
            of_p = of_logprobs[:, None] + of_entropies[:, None] * (log_p + entropies[:, None])
            if other:
                of_kl, other_states, other_log_z, kl = more
                logits = _logits(other_states, other.matrix, columns, other_tiles)
                log_q = logits - other_log_z[:, None]
                of_p -= of_kl[:, None] * (log_p - log_q - kl[:, None])
            index, inside = columns.index_of(ids)
            is_token = (index[:, None] == jnp.arange(columns.size)[None]) & inside[:, None]
            of_logits = jnp.where(is_token, of_logprobs[:, None], 0.0) - jnp.exp(log_p) * of_p
            of_logits = of_logits / tiles.temperature
            if cap := tiles.softcap:  # d c tanh(z / c) / dz; clipped, because of UNSEEN columns
                tanh = (log_p + log_z[:, None]) * tiles.temperature / cap
                of_logits *= 1.0 - jnp.clip(tanh, -1.0, 1.0) ** 2
            of_logits = of_logits.astype(states.dtype)
            part = _columns_of(matrix, columns, tiles)
            of_states += _product(of_logits, part, 1, tiles.vocabulary_axis)
            pair = (of_logits, states) if contracted else (states, of_logits)
            of_part = _columns_of(of_matrix, columns, tiles) + _product(*pair, 0, 0)
            return of_states, jax.lax.dynamic_update_slice_in_dim(
                of_matrix, of_part, columns.first, tiles.vocabulary_axis
            )

        start = _zeros(states.shape, states, matrix), of_matrix
        of_states, of_matrix = _over_columns(add, start, len(ids), matrix, tiles)
        return of_matrix, of_states

    of_matrix, of_states = _over_rows(
        of_rows,
        (states, ids, log_z, entropies, *gradients, *((other.states, *rest) if other else ())),
        matrix,
        tiles,
        carry=_zeros(matrix.shape, states, matrix),
    )
    return of_states.astype(states.dtype), None, of_matrix.astype(matrix.dtype), None


token_logprobs.defvjp(_forward, _backward)


def _own_ids(token_ids, matrix, tiles):
    """Ids from the first one of this device's slice of the vocabulary."""
    if tiles.axis is None:
        return token_ids
    return token_ids - jax.lax.axis_index(tiles.axis) * matrix.shape[tiles.vocabulary_axis]


def _logits(states, matrix, columns, tiles):
    """Float32 logits [R, C] of a tile."""
    part = _columns_of(matrix, columns, tiles)
    logits = _product(states, part, 1, 1 - tiles.vocabulary_axis)
    if cap := tiles.softcap:
        logits = cap * jnp.tanh(logits / cap)
    logits = logits / tiles.temperature
    if isinstance(columns.num_seen, int):
        return logits
    return jnp.where(jnp.arange(columns.size)[None] >= columns.num_seen, logits, UNSEEN)


def _columns_of(matrix, columns, tiles):
    return jax.lax.dynamic_slice_in_dim(matrix, columns.first, columns.size, tiles.vocabulary_axis)


def _product(first, second, of_first, of_second):
    """Sums over axis `of_first` of the first and axis `of_second` of the second; float32."""
    return jax.lax.dot_general(
        first, second, (((of_first,), (of_second,)), ((), ())), preferred_element_type=jnp.float32
    )


def _over_columns(step, carry, num_rows, matrix, tiles):
    """Carries `step(carry, columns)` over the tiles of a block of rows."""
    total = matrix.shape[tiles.vocabulary_axis]
    size = tiles.sizes(num_rows, total)[1]

    def of_tile(carry, index):
        first = jnp.minimum(index * size, total - size)
        num_seen = index * size - first if total % size else 0
        return step(carry, _Columns(first, size, num_seen)), None

    return jax.lax.scan(of_tile, carry, jnp.arange(-(-total // size)))[0]


def _over_rows(function, arrays, matrix, tiles, carry=None):
    """`function` of all blocks of rows, arrays [N, ...] in and out; with a carry if given."""
    num_rows = len(arrays[0])
    size = tiles.sizes(num_rows, matrix.shape[tiles.vocabulary_axis])[0]
    if size == num_rows:
        return function(arrays) if carry is None else function(carry, arrays)
    padding = -num_rows % size

    def split(x):
        x = jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, size, *x.shape[1:])

    def whole(x):
        return x.reshape(-1, *x.shape[2:])[:num_rows]

    blocks = jax.tree.map(split, arrays)
    if carry is None:
        return jax.tree.map(whole, jax.lax.map(function, blocks))
    carry, found = jax.lax.scan(function, carry, blocks)
    return carry, jax.tree.map(whole, found)


def _zeros(shape, *like):
    """Float32 zeros that shard_map treats as varying over the mesh axes of all of `like`."""
    return sum(jnp.zeros_like(x, jnp.float32, shape=shape) for x in like)
