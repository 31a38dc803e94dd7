"""Samples tokens from logits: penalties, temperature, min-p, top-k, top-p. Pure.

Each response has a random key. Each of the four kinds of sampling has a program, and another one
with penalties or a minimal length. Within a kind, the settings are its inputs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from semrl_jax.settings.rollout import MIN_TEMPERATURE
from semrl_jax.types import SamplingParams

SamplingKind = Literal["greedy", "unmodified", "scaled", "truncated"]
MAX_TEMPERATURE = 2**31  # all tokens are then equally likely; the inverse of larger ones may be 0


class Penalties(NamedTuple):
    """The settings of `penalised_logits` as scalars."""

    presence: Float[Array, ""] | Float[np.ndarray, ""]
    frequency: Float[Array, ""] | Float[np.ndarray, ""]
    repetition: Float[Array, ""] | Float[np.ndarray, ""]
    min_tokens: Int[Array, ""] | Int[np.ndarray, ""]


class SamplingValues(NamedTuple):
    """The settings of `sampling_logits` as scalars; the kind decides which of them are used."""

    temperature: Float[Array, ""] | Float[np.ndarray, ""]
    top_k: Int[Array, ""] | Int[np.ndarray, ""]
    top_p: Float[Array, ""] | Float[np.ndarray, ""]
    min_p: Float[Array, ""] | Float[np.ndarray, ""]
    penalties: Penalties | None = None  # of `penalised_logits`


def split_sampling(sampling: SamplingParams) -> tuple[SamplingKind, SamplingValues]:
    """The static kind and the values of the settings; temperature 0 in float32 is greedy."""
    penalties = None
    if sampling.has_penalties or sampling.min_tokens:
        penalties = Penalties(
            np.asarray(sampling.presence_penalty, np.float32),
            np.asarray(sampling.frequency_penalty, np.float32),
            np.asarray(sampling.repetition_penalty, np.float32),
            np.asarray(sampling.min_tokens, np.int32),
        )
    temperature = np.float32(min(sampling.temperature, MAX_TEMPERATURE))
    if temperature:  # a client may ask for less; vLLM raises it, too
        temperature = max(temperature, np.float32(MIN_TEMPERATURE))
    values = SamplingValues(
        np.asarray(temperature),
        np.asarray(sampling.top_k, np.int32),
        np.asarray(sampling.top_p, np.float32),
        np.asarray(sampling.min_p, np.float32),
        penalties,
    )
    if values.temperature == 0:
        return "greedy", values
    if sampling.is_truncated:
        return "truncated", values
    return ("unmodified" if values.temperature == 1 else "scaled"), values


def penalised_logits(
    logits: Float[Array, "B V"],
    counts: Int[Array, "B V"] | None,
    token_index: Int[Array, " B"],
    end_ids: Int[Array, " E"],
    values: Penalties,
) -> Float[Array, "B V"]:
    """Logits with the penalties of tokens that were used, and without ends that come too early.

    Args:
      logits: float32.
      counts: int32, twice the number of times that the response has a token, plus 1 if the prompt
        has it. None: there are no penalties.
      token_index: index of the token in its response.
      end_ids: tokens that end a response; -1 is padding.
      values: repetition > 0 divides positive logits and multiplies others, of tokens in prompt or
        response. Then `frequency` is subtracted once per use in the response, and `presence` once
        if there is one. Before token `min_tokens`, ends have the logit -inf.

    Returns float32 logits; the other settings of the sampling come after them.

    Source: vLLM 0.32, `v1/sample/sampler.py` and `model_executor/layers/utils.py`.
    """
    if counts is not None:
        factor = jnp.where(logits > 0, 1 / values.repetition, values.repetition)
        logits = jnp.where(counts > 0, logits * factor, logits)
        num_used = (counts >> 1).astype(jnp.float32)
        logits = logits - values.frequency * num_used - values.presence * (num_used > 0)
    num_tokens = logits.shape[1]
    is_end = jnp.zeros(num_tokens + 1, bool).at[end_ids].set(True)[:num_tokens]  # [-1] is padding
    is_early = (token_index < values.min_tokens)[:, None]
    return jnp.where(is_early & is_end[None], -jnp.inf, logits)


def sampling_logits(
    logits: Float[Array, "B V"], values: SamplingValues, *, kind: SamplingKind
) -> Float[Array, "B V"]:
    """Logits of the sampling distribution: scaled, then truncated by min-p, top-k and top-p.

    Args:
      logits: float32.
      values: temperature > 0. min_p keeps the tokens whose probability is at least min_p times the
        largest one; 0 keeps all. top_k keeps the k largest logits and ties with the k-th; 0 keeps
        all. top_p keeps the smallest set of most probable tokens whose probabilities sum to at
        least top_p; 1 keeps all.
      kind: static, from `split_sampling`; "greedy" and "unmodified" change nothing.

    Returns float32 logits, -inf where a token cannot be sampled; at least one is finite.
    """
    if kind in ("greedy", "unmodified"):
        return logits
    # Not a division: the compiler replaces division by a constant in this way, too.
    logits = logits * (1 / values.temperature)
    if kind == "scaled":
        return logits
    num_tokens = logits.shape[-1]
    likeliest = jnp.max(logits, axis=-1, keepdims=True)
    logits = jnp.where(logits >= likeliest + jnp.log(values.min_p), logits, -jnp.inf)
    ordered = jnp.sort(logits, axis=-1, descending=True)
    num_kept = jnp.where(values.top_k > 0, jnp.minimum(values.top_k, num_tokens), num_tokens)
    threshold = jax.lax.dynamic_index_in_dim(ordered, num_kept - 1, axis=-1)
    ordered = jnp.where(ordered >= threshold, ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # Rounded sums may reach 1 before the last token, but top_p = 1 must keep all tokens.
    kept = (before < values.top_p) | (values.top_p >= 1)
    num_kept = jnp.maximum(jnp.sum(kept & (ordered > -jnp.inf), axis=-1, keepdims=True), 1)
    threshold = jnp.take_along_axis(ordered, num_kept - 1, axis=-1)
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def sample_tokens(
    logits: Float[Array, "B V"],
    keys: UInt32[Array, "B 2"],
    token_index: Int[Array, " B"],
    values: SamplingValues,
    *,
    kind: SamplingKind,
    axis: str | None = None,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """Samples one token per row; the noise of row b depends on keys[b] and token_index[b] only.

    Args:
      logits: float32.
      keys: raw threefry key data, one key per response.
      token_index: index of the token in its response.
      values, kind: see `sampling_logits`; "greedy" takes the largest logit.
      axis: of a mesh over which the vocabulary is split, inside a shard_map; V is then the part of
        this device, in whole blocks of `block_size`. Only for "unmodified" and "scaled".

    Returns int32 token ids, their float32 log-probabilities (nats) under the sampling distribution,
    and under the unmodified logits. Greedy sampling returns the second for both: under its own
    distribution the log-probability is always 0.
    """
    if kind == "greedy":
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logprobs = _taken(logits, tokens) - jax.nn.logsumexp(logits, axis=-1)
        return tokens, logprobs, logprobs
    adjusted = sampling_logits(logits, values, kind=kind)
    tokens, log_total = _inverse_cdf(adjusted, keys, token_index, axis)
    logprobs = _taken(adjusted, tokens, axis) - log_total
    if kind == "unmodified":
        return tokens, logprobs, logprobs
    largest = _largest(logits, axis)
    total = jnp.sum(jnp.exp(logits - largest[:, None]), axis=-1)
    if axis is not None:
        total = jax.lax.psum(total, axis)
    return tokens, logprobs, _taken(logits, tokens, axis) - (largest + jnp.log(total))


def sampling_entropies(
    logits: Float[Array, "B V"], values: SamplingValues, *, kind: SamplingKind
) -> Float[Array, " B"]:
    """The entropy of the distribution of `sampling_logits`, in nats; arguments as there.

    With "greedy", of the unmodified logits. Tokens that cannot be sampled add nothing.
    """
    logprobs = jax.nn.log_softmax(sampling_logits(logits, values, kind=kind), axis=-1)
    terms = jnp.exp(logprobs) * logprobs
    return -jnp.sum(jnp.where(logprobs > -jnp.inf, terms, 0.0), axis=-1)


def block_size(num_tokens: int) -> int:
    """The tokens of a block, a power of two: about sqrt(V), or a divisor of V / 8.

    The blocks of a vocabulary are the same on every mesh. If the vocabulary is split over up to 8
    devices, each of them usually has whole blocks.
    """
    size = 1 << -(-(num_tokens - 1).bit_length() // 2)
    divisor = (num_tokens // 8) & -(num_tokens // 8) if num_tokens % 8 == 0 else 0
    return min(size, divisor) if divisor >= 16 else size


def _inverse_cdf(
    logits: Float[Array, "B V"],
    keys: UInt32[Array, "B 2"],
    token_index: Int[Array, " B"],
    axis: str | None,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Samples by the inverse of the cumulative distribution: a block of tokens, then one of it.

    The Gumbel method takes a random number per token of the vocabulary, a third of the decode step
    of a small model. Here one number of 24 bits is for the block and one for the token in it. The
    probability of a block is exact to about 3e-7. Returns int32 token ids, and the logarithm of the
    sum of exp(logits).
    """
    num_rows, num_own = logits.shape
    num_tokens = num_own if axis is None else num_own * jax.lax.axis_size(axis)
    size = block_size(num_tokens)
    num_blocks = -(-num_own // size)
    largest = _largest(logits, axis)
    weights = jnp.exp(logits - largest[:, None])
    weights = jnp.pad(weights, ((0, 0), (0, num_blocks * size - num_own)))
    weights = weights.reshape(num_rows, num_blocks, size)
    of_blocks = jnp.sum(weights, axis=-1)
    if axis is not None:
        of_blocks = jax.lax.all_gather(of_blocks, axis, axis=1, tiled=True)

    def uniforms(key, index):
        bits = jax.random.bits(jax.random.fold_in(jax.random.wrap_key_data(key), index), (2,))
        return (bits >> 8).astype(jnp.float32) * 2.0**-24  # in [0, 1)

    first, second = jax.vmap(uniforms, out_axes=1)(keys, token_index)
    block = _first_above(of_blocks, first)
    in_block = _taken(weights, block, axis)
    token = block * size + _first_above(in_block, second)
    return token, largest + jnp.log(jnp.sum(of_blocks, axis=-1))


def _first_above(weights: Float[Array, "B N"], share: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first index with a weight whose sum up to it exceeds `share` of all; else the last."""
    sums = jnp.cumsum(weights, axis=-1)
    # A parallel sum may grow, by rounding, where the weight is 0.
    above = (sums > share[:, None] * sums[:, -1:]) & (weights > 0)
    last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    return jnp.where(jnp.any(above, axis=-1), jnp.argmax(above, axis=-1), last).astype(jnp.int32)


def _taken(
    values: Float[Array, "B N ..."], index: Int[Array, " B"], axis: str | None = None
) -> Float[Array, "B ..."]:
    """values[b, index[b]]; with an axis, `index` counts over its devices, and one has the value."""
    rows = jnp.arange(len(index))
    if axis is None:
        return values[rows, index]
    own = index - jax.lax.axis_index(axis) * values.shape[1]
    found = values[rows, jnp.clip(own, 0, values.shape[1] - 1)]
    is_own = (own >= 0) & (own < values.shape[1])
    is_own = is_own.reshape(-1, *[1] * (found.ndim - 1))
    return jax.lax.psum(jnp.where(is_own, found, 0.0), axis)


def _largest(logits: Float[Array, "B V"], axis: str | None) -> Float[Array, " B"]:
    largest = jnp.max(logits, axis=-1)
    return largest if axis is None else jax.lax.pmax(largest, axis)
