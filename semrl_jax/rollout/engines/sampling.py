"""Samples tokens from logits: temperature, top-k, top-p, one random key per response. Pure.

Each of the four kinds of sampling has a program. Within a kind, the settings are its inputs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from semrl_jax.types import Annealing, SamplingParams

SamplingKind = Literal["greedy", "unmodified", "scaled", "truncated"]


class AnnealingValues(NamedTuple):
    """The fields of `types.Annealing` as scalars."""

    maximum: Float[Array, ""] | Float[np.ndarray, ""]
    minimum: Float[Array, ""] | Float[np.ndarray, ""]
    warmup_tokens: Int[Array, ""] | Int[np.ndarray, ""]
    decay_tokens: Float[Array, ""] | Float[np.ndarray, ""]


# The factor of every token is 1: no response leaves this warm-up.
_CONSTANT = Annealing(1.0, 1.0, np.iinfo(np.int32).max, np.inf)


class SamplingValues(NamedTuple):
    """The settings of `sampling_logits` as scalars; the kind decides which of them are used."""

    temperature: Float[Array, ""] | Float[np.ndarray, ""]
    top_k: Int[Array, ""] | Int[np.ndarray, ""]
    top_p: Float[Array, ""] | Float[np.ndarray, ""]
    annealing: AnnealingValues


def split_sampling(sampling: SamplingParams) -> tuple[SamplingKind, SamplingValues]:
    """Splits the settings into the static kind and the values: float32 and int32 scalars.

    A temperature that is 0 in float32 is greedy.
    """
    annealing = sampling.annealing or _CONSTANT
    values = SamplingValues(
        np.asarray(sampling.temperature, np.float32),
        np.asarray(sampling.top_k, np.int32),
        np.asarray(sampling.top_p, np.float32),
        AnnealingValues(
            np.asarray(annealing.maximum, np.float32),
            np.asarray(annealing.minimum, np.float32),
            np.asarray(annealing.warmup_tokens, np.int32),
            np.asarray(annealing.decay_tokens, np.float32),
        ),
    )
    if values.temperature == 0:
        return "greedy", values
    if values.top_k > 0 or values.top_p < 1:
        return "truncated", values
    is_unmodified = values.temperature == 1 and sampling.annealing is None
    return ("unmodified" if is_unmodified else "scaled"), values


def temperature_factors(
    token_index: Int[Array, " B"], values: AnnealingValues
) -> Float[Array, " B"]:
    """What the temperature is multiplied with at these tokens: `types.Annealing`, in float32."""
    exponents = token_index.astype(jnp.float32) / values.decay_tokens
    annealed = jnp.maximum(1 + values.maximum - jnp.exp(exponents), values.minimum)
    return jnp.where(token_index < values.warmup_tokens, 1.0, annealed)


def sampling_logits(
    logits: Float[Array, "B V"],
    token_index: Int[Array, " B"],
    values: SamplingValues,
    *,
    kind: SamplingKind,
) -> Float[Array, "B V"]:
    """Logits of the sampling distribution: scaled, then truncated to top-k, then to top-p.

    Args:
      logits: float32.
      token_index: index of the token in its response.
      values: temperature > 0, times `temperature_factors`. top_k keeps the k largest logits and
        ties with the k-th; 0 keeps all. top_p keeps the smallest set of most probable tokens whose
        probabilities sum to at least top_p; 1 keeps all.
      kind: static, from `split_sampling`; "greedy" and "unmodified" change nothing.

    Returns:
      Float32 logits, -inf where a token cannot be sampled; at least one is finite.
    """
    if kind in ("greedy", "unmodified"):
        return logits
    # Not a division: the compiler replaces division by a constant in this way, too.
    temperatures = values.temperature * temperature_factors(token_index, values.annealing)
    logits = logits * (1 / temperatures[:, None])
    if kind == "scaled":
        return logits
    num_tokens = logits.shape[-1]
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
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """Samples one token per row; the noise of row b depends on keys[b] and token_index[b] only.

    Args:
      logits: float32.
      keys: raw threefry key data, one key per response.
      token_index: index of the token in its response.
      values: see `sampling_logits`.
      kind: static; "greedy" takes the largest logit.

    Returns:
      int32 token ids, their float32 log-probabilities (nats) under the sampling distribution, and
      under the unmodified logits. Greedy sampling returns the second for both: under its own
      distribution the log-probability is always 0.
    """
    adjusted = sampling_logits(logits, token_index, values, kind=kind)
    if kind == "greedy":
        tokens = jnp.argmax(logits, axis=-1)
    else:

        def draw(key, index, row):
            return jax.random.categorical(
                jax.random.fold_in(jax.random.wrap_key_data(key), index), row
            )

        tokens = jax.vmap(draw)(keys, token_index, adjusted)
    tokens = tokens.astype(jnp.int32)
    return tokens, _logprob_of(adjusted, tokens), _logprob_of(logits, tokens)


def _logprob_of(logits: Float[Array, "B V"], tokens: Int[Array, " B"]) -> Float[Array, " B"]:
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
