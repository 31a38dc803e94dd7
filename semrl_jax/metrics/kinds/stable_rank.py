"""Stable rank of one response: its energy divided by the energy of the strongest direction."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.metrics.inputs import AnyArray
from semrl_jax.metrics.metric import Metric
from semrl_jax.metrics.prefixes import whole_response


def stable_rank(
    hidden_states: Float[AnyArray, "T D"],
    response_mask: Bool[AnyArray, " T"],
    *,
    method: str = "svd",
) -> Float[Array, ""]:
    """Computes sum sigma^2 / max sigma^2, sigma the singular values of the centred rows.

    Args:
      hidden_states, response_mask, method: as in `effective_rank`.

    Returns:
      Float32 in [1, min(T - 1, D)]; 0.0 if T < 2, if all rows are equal or one is not finite.

    Raises:
      ValueError: for a wrong rank, shape, dtype or method.

    Source: Rudelson and Vershynin, arXiv:math/0503442, who take any matrix; the rows are centred
    here, as for `effective_rank`.
    """
    return whole_response(METRIC, hidden_states, response_mask, method)


def stable_rank_of(
    sigma: Float[Array, " S"], scale: Float[Array, ""], num_rows: Int[Array, ""], width: int
) -> Float[Array, ""]:
    """Stable rank of a spectrum; sigma in any unit."""
    largest = jnp.max(sigma, initial=0.0)
    ratios = sigma / jnp.where(largest > 0, largest, 1.0)
    return jnp.where(num_rows >= 2, jnp.sum(ratios**2), 0.0)


METRIC = Metric(of_spectrum=stable_rank_of, min_tokens=2)
