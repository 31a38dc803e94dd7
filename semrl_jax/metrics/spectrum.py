"""Singular values of the centred prefixes of one response, from one shared factorisation.

With rows Z shifted by a common vector, every prefix of n rows needs the singular values of J Z[:n],
where J subtracts the mean. `svd` factors Z^T = Q R once; those of R[:, :n] J are the same, and R is
at most T x T. `gram` forms G = Z Z^T once; the eigenvalues of J G[:n, :n] J are their squares. A
prefix longer than D takes the D x D scatter matrix instead.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Rounding leaves eigenvalues of about one epsilon of the largest where true ones are zero, and
# there may be hundreds; four epsilons put the floor at sigma = 7e-4 sigma_max.
GRAM_FLOOR = 4 * 1.1920929e-07


@jax.custom_batching.sequential_vmap
def singular_values(matrix: Float[Array, "M N"], active: Bool[Array, ""]) -> Float[Array, " S"]:
    """Descending singular values; zeros where not active, at no cost.

    The loop under `vmap` is meant: batched solvers on CPU wait inside the pool that runs them.
    """
    zeros = jnp.zeros(min(matrix.shape), jnp.float32)
    return jax.lax.cond(
        active, lambda a: jnp.linalg.svd(a, compute_uv=False), lambda a: zeros, matrix
    )


@jax.custom_batching.sequential_vmap
def symmetric_eigenvalues(gram: Float[Array, "N N"], active: Bool[Array, ""]) -> Float[Array, " N"]:
    """Descending eigenvalues of a positive semi-definite matrix; zeros where not active."""

    def values(a: Float[Array, "N N"]) -> Float[Array, " N"]:
        # eigh always makes the vectors; on CPU the singular values alone take two thirds of that.
        return jax.lax.platform_dependent(
            a,
            cpu=lambda a: jnp.linalg.svd(a, compute_uv=False),
            default=lambda a: jnp.linalg.eigvalsh(a)[::-1],
        )

    return jax.lax.cond(active, values, lambda a: jnp.zeros(a.shape[:1], jnp.float32), gram)


@jax.custom_batching.sequential_vmap
def triangular_factor(matrix: Float[Array, "M N"]) -> Float[Array, "S N"]:
    """R of Q R = matrix."""
    return jnp.linalg.qr(matrix, mode="r")


class PrefixSpectra:
    """Singular values of the first n of `states`' rows, for any n, after centring those n."""

    def __init__(self, states: Float[Array, "T D"], method: str):
        """Takes anchored rows (inputs.anchor), zero past the valid ones, and 'gram' or 'svd'."""
        self.states, self.method = states, method
        if method == "svd":
            # Column n of R depends on rows 1..n only and is zero below its entry n.
            self._factor = triangular_factor(states.T)  # [min(T, D), T]
        else:
            short = states[: min(states.shape)]
            self._factor = _product(short, short.T)  # [min(T, D), min(T, D)]

    def __call__(
        self, size: int, num_rows: Int[Array, ""], active: Bool[Array, ""]
    ) -> Float[Array, " S"]:
        """Descending singular values of the first `num_rows` rows, num_rows <= size.

        Args:
          size: static number of rows the decomposition is compiled for.
          num_rows: how many of them this prefix has.
          active: False skips the decomposition and returns zeros.
        """
        width = self.states.shape[1]
        valid = jnp.arange(size) < num_rows
        count = jnp.maximum(num_rows, 1).astype(jnp.float32)
        if self.method == "svd":
            columns = self._factor[: min(size, width), :size]
            mean = jnp.sum(jnp.where(valid[None], columns, 0.0), axis=1, keepdims=True) / count
            return singular_values(jnp.where(valid[None], columns - mean, 0.0), active)
        if size <= width:
            both = valid[:, None] & valid[None]
            gram = jnp.where(both, self._factor[:size, :size], 0.0)
            mean = jnp.sum(gram, axis=1, keepdims=True) / count  # [N, 1]
            centred = gram - mean - mean.T + jnp.sum(mean, keepdims=True) / count
            eigenvalues = symmetric_eigenvalues(jnp.where(both, centred, 0.0), active)
        else:
            rows = self.states[:size]
            mean = jnp.sum(jnp.where(valid[:, None], rows, 0.0), axis=0, keepdims=True) / count
            rows = jnp.where(valid[:, None], rows - mean, 0.0)
            eigenvalues = symmetric_eigenvalues(_product(rows.T, rows), active)
        # Centring takes one dimension: a value past min(T - 1, D) is rounding.
        rank_bound = jnp.minimum(num_rows - 1, width)
        floor = GRAM_FLOOR * jnp.max(eigenvalues, initial=0.0)
        real = (jnp.arange(eigenvalues.shape[0]) < rank_bound) & (eigenvalues > floor)
        return jnp.sqrt(jnp.where(real, eigenvalues, 0.0))


def _product(a: Float[Array, "M K"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    """Float32 product also where the accelerator would round its inputs."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
