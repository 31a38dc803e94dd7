"""From logits to a token: temperature, top-k, top-p, one key a response. Pure."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from semrl_jax.types import SamplingParams


def sampling_logits(
    logits: Float[Array, "B V"], *, temperature: float, top_k: int, top_p: float
) -> Float[Array, "B V"]:
    """Logits of the distribution sampled from: scaled, then cut to top-k, then to top-p.

    Args:
      logits: float32.
      temperature: > 0.
      top_k: keeps the k largest, ties with the k-th included; 0 keeps all.
      top_p: keeps the smallest set of largest probabilities that sums to at least this.

    Returns:
      Float32 logits, -inf where a token cannot be drawn; at least one is finite.
    """
    logits = logits / temperature
    if top_k and top_k < logits.shape[-1]:
        threshold = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    if top_p < 1.0:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The first token has 0 before it, so one always stays.
        kept = jnp.sum(before < top_p, axis=-1, keepdims=True)
        threshold = jnp.take_along_axis(ordered, kept - 1, axis=-1)
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    return logits


def sample_tokens(
    logits: Float[Array, "B V"],
    keys: UInt32[Array, "B 2"],
    token_index: Int[Array, " B"],
    sampling: SamplingParams,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """Draws one token a row; row b's noise follows from (keys[b], token_index[b]) alone.

    Args:
      logits: float32.
      keys: raw threefry key data of each response.
      token_index: index of the token in its response.
      sampling: static; temperature 0 takes the largest logit.

    Returns:
      int32 token ids, their float32 log-probabilities under the distribution sampled from, and
      under the unmodified logits. Greedy draws report the unmodified one in both places, since the
      log-probability of a certain event says nothing.
    """
    if sampling.temperature == 0.0:
        adjusted = logits
        tokens = jnp.argmax(logits, axis=-1)
    else:
        adjusted = sampling_logits(
            logits,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )

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
