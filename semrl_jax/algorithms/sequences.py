"""Sums over sequences whose tokens share a row with those of others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sum_over_sequences(
    values: Float[Array, "R U"], sequence_ids: Int[Array, "R U"]
) -> Float[Array, "R U"]:
    """Sums the values of each sequence, and gives every token the sum of its sequence.

    A sequence-level quantity, such as a ratio of sequence probabilities, is then an array over
    tokens, as a loss takes it. Under `token_weights(..., aggregation="response_mean")` the weights
    of one sequence sum to 1 / number of sequences, so a weighted sum of such an array is its mean
    over sequences.

    Args:
      values: per token, summed in float32, with gradient.
      sequence_ids: which sequence of its row each token belongs to, from 1 to at most U; 0 at
        padding, where `values` may hold anything. Of padded rows [B, T] the response mask as
        int32, of packed ones `TokenRows.sequence_ids`.

    Returns:
      Float32; 0.0 at padding. Rows are summed apart, so rows on several devices need no exchange.
    """
    mask = sequence_ids > 0
    values = jnp.where(mask, values.astype(jnp.float32), 0.0)

    def of_row(values, ids):
        return jax.ops.segment_sum(values, ids, num_segments=values.shape[0] + 1)[ids]

    return jnp.where(mask, jax.vmap(of_row)(values, sequence_ids), 0.0)
