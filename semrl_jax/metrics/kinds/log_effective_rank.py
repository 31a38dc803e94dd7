"""The logarithm of the effective rank, in nats; see `effective_rank`.

"svd" has a relative error of 1e-5, "gram" an absolute one of 1e-3. 0.0 if T < 2.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from semrl_jax.metrics.metric import Metric
from semrl_jax.metrics.nested import SpectralSums
from semrl_jax.metrics.prefixes import EPSILON


def log_effective_rank_of(
    sigma: Float[Array, " S"], scale: Float[Array, ""], num_rows: Int[Array, ""], width: int
) -> Float[Array, ""]:
    """Entropy of the normalised spectrum, in nats; sigma in units of `scale`."""
    total = jnp.sum(sigma) + EPSILON / scale
    p = sigma / jnp.where(total > 0, total, 1.0)  # a huge scale rounds the 1e-8 to zero
    entropy = jnp.abs(jnp.sum(p * jnp.log(p + EPSILON)))  # 0.0, never -0.0
    return jnp.where(num_rows >= 2, entropy, 0.0)


def log_effective_rank_of_sums(
    sums: SpectralSums, scale: Float[Array, ""], num_rows: Int[Array, " *K"], width: int
) -> Float[Array, " *K"]:
    """`log_effective_rank_of` from sums over the spectrum.

    p log(p + 1e-8) is p log p + 1e-8 for each p well above 1e-8.
    """
    total = sums.total + EPSILON / scale
    log_total = jnp.log(jnp.where(total > 0, total, 1.0))
    entropy = (sums.total * log_total - sums.weighted) / jnp.where(total > 0, total, 1.0)
    return jnp.where(num_rows >= 2, jnp.maximum(entropy - sums.count * EPSILON, 0.0), 0.0)


METRIC = Metric(of_spectrum=log_effective_rank_of, of_sums=log_effective_rank_of_sums, min_tokens=2)
