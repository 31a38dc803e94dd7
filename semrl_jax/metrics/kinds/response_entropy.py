"""Response entropy: the Renyi entropy of order a = 1.0001 of the covariance spectrum.

q_k = lambda_k / sum lambda over lambda_k > 1e-8,  H = log(sum q_k^a) / (1 - a)

lambda are the eigenvalues of the scatter matrix.

In nats in [0, log min(T - 1, D)]; 0.0 if T < 2, or if no eigenvalue exceeds 1e-8 (in units of the
hidden states squared).

Source: the reference implementation. It evaluates the formula as written, which in float32 costs
6e-4; here log1p and expm1 keep full precision.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from semrl_jax.metrics.kinds.matrix_entropy import renyi_entropy
from semrl_jax.metrics.metric import Metric
from semrl_jax.metrics.prefixes import EPSILON

ORDER = 1.0001


def response_entropy_of(
    sigma: Float[Array, " S"], scale: Float[Array, ""], num_rows: Int[Array, ""], width: int
) -> Float[Array, ""]:
    """Renyi entropy of a spectrum, in nats; sigma in units of `scale`."""
    # Compares roots and squares ratios: other squares could leave the range of float32.
    kept = jnp.where(sigma > EPSILON**0.5 / scale, sigma, 0.0)
    largest = jnp.max(kept, initial=0.0)
    eigenvalues = (kept / jnp.where(largest > 0, largest, 1.0)) ** 2
    total = jnp.sum(eigenvalues)
    q = eigenvalues / jnp.where(total > 0, total, 1.0)
    entropy = renyi_entropy(q, ORDER)
    return jnp.where(num_rows >= 2, entropy, 0.0)


METRIC = Metric(of_spectrum=response_entropy_of, min_tokens=2)
