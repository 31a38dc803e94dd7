"""Log-determinant diversity of a group: the volume that its responses span."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.metrics.sets.elliptical_novelty import checked, kernel
from semrl_jax.metrics.spectrum import with_float64
from semrl_jax.metrics.valid_rows import AnyArray


def log_determinant(
    features: Float[AnyArray, "G D"], mask: Bool[AnyArray, " G"]
) -> Float[Array, ""]:
    """Computes log det(I + X X^T) of the responses of a group, in float64.

    It is the sum over the responses of log(1 + novelty against the ones before). Arguments and
    errors as of `elliptical_novelty`.

    Returns float32 nats, at least 0. For rows of length one it is at most G log 2, if all are
    orthogonal, and log(1 + G) if all are equal; 0.0 without responses, or if a row under the mask
    is not finite.

    Source: determinantal point processes, arXiv:1207.6083; the identity is the elliptical potential
    of arXiv:1102.2670.
    """
    return with_float64(_log_determinant)(*checked(features, mask))


def _log_determinant(rows: Float[Array, "G D"], mask: Bool[Array, " G"]) -> Float[Array, ""]:
    factor = jnp.linalg.cholesky(kernel(rows, mask))
    return (2.0 * jnp.sum(jnp.log(jnp.diagonal(factor)))).astype(jnp.float32)
