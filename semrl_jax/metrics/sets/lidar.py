"""LiDAR: the number of directions that tell classes of states apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.special import entr
from jaxtyping import Array, Bool, Float

from semrl_jax.metrics.spectrum import with_float64
from semrl_jax.metrics.valid_rows import AnyArray, check_states

DELTA = 1e-4  # of the paper


@jax.jit
def lidar(states: Float[AnyArray, "C N D"], mask: Bool[AnyArray, "C N"]) -> Float[Array, ""]:
    """Computes exp(-sum p log p), p the normalised eigenvalues of S_w^-1/2 S_b S_w^-1/2.

    S_b is the covariance of the class means. S_w is the mean covariance within the classes, plus
    1e-4 I. All classes count the same. Computed in float64.

    Args:
      states: the members of each class; any real float dtype. Classes may be the prompts of a batch
        and their members the mean states of the responses; or the responses to one prompt, and
        their members the states of the tokens. Members outside the mask may hold anything.
      mask: True on members that count. A class without any is left out.

    Returns float32 in [1, min(C - 1, D)]; 0.0 if fewer than two classes remain, if all their means
    are equal, or if a member under the mask is not finite.

    Source: arXiv:2312.04000, whose classes are images and whose members are augmentations. The
    paper adds a constant to p against log 0, which is not needed here.
    """
    check_states(
        states, mask, axes="[C, N, D], classes and their members", fields=("states", "mask")
    )
    mask = jnp.asarray(mask)
    states = jnp.where(mask[..., None], jnp.asarray(states).astype(jnp.float32), 0.0)
    finite = jnp.all(jnp.isfinite(states))
    states = jnp.where(finite, states, 0.0)  # LAPACK may hang on NaN
    return jnp.where(finite, with_float64(_lidar)(states, mask), 0.0)


def _lidar(states: Float[Array, "C N D"], mask: Bool[Array, "C N"]) -> Float[Array, ""]:
    num_classes, num_members, width = states.shape
    if num_classes * num_members == 0:
        return jnp.float32(0)
    states = states.astype(jnp.float64)
    sizes = jnp.sum(mask, axis=1).astype(jnp.float64)  # [C]
    counts = sizes > 0
    classes = jnp.maximum(jnp.sum(counts), 1).astype(jnp.float64)
    means = jnp.sum(states, axis=1) / jnp.maximum(sizes, 1.0)[:, None]  # [C, D]
    centre = jnp.sum(means, axis=0, keepdims=True) / classes
    between = jnp.where(counts[:, None], means - centre, 0.0) / jnp.sqrt(classes)
    within = jnp.where(mask[..., None], states - means[:, None], 0.0)
    within /= jnp.sqrt(jnp.maximum(sizes, 1.0) * classes)[:, None, None]
    # The result does not depend on the basis: one of the span of all rows has at most as many
    # dimensions as there are rows.
    rows = jnp.concatenate([between, within.reshape(-1, width)])
    if rows.shape[0] < width:
        rows = jnp.linalg.qr(rows.T, mode="r").T
    between, within = rows[:num_classes], rows[num_classes:]
    scatter = jnp.matmul(within.T, within, precision=jax.lax.Precision.HIGHEST)
    factor = jnp.linalg.cholesky(scatter + DELTA * jnp.eye(rows.shape[1]))
    solved = jax.scipy.linalg.solve_triangular(factor, between.T, lower=True)
    eigenvalues = jnp.linalg.svd(solved, compute_uv=False) ** 2
    total = jnp.sum(eigenvalues)
    rank = jnp.exp(jnp.sum(entr(eigenvalues / jnp.where(total > 0, total, 1.0))))
    return jnp.where(total > 0, rank, 0.0).astype(jnp.float32)
