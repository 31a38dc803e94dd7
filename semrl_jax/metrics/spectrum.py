"""Singular values of the centred prefixes of one response, from one shared Gram matrix.

With rows Z shifted by a common vector, G = Z Z^T is formed once; the eigenvalues of J G[:n, :n] J,
where J subtracts the mean, are the squares of the singular values of the first n rows, centred. A
prefix longer than D takes the D x D scatter matrix instead. Squaring halves the digits: float64
keeps those of a float32 decomposition and more, float32 those above its floor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

try:
    from jaxlib import lapack
except ImportError:  # not public: without it eigvalsh serves, which makes vectors nobody reads
    lapack = None

# Rounding leaves eigenvalues of about one epsilon of the largest where true ones are zero, and
# there may be hundreds; four epsilons put the floor at sigma = 7e-4 sigma_max in float32.
FLOOR_EPSILONS = 4


def eigenvalue_kernel(dtype: np.dtype) -> str | None:
    """Name of LAPACK's symmetric eigenvalue kernel in this jaxlib; None if it has none."""
    try:
        target = lapack.prepare_lapack_call("syevd_ffi", np.dtype(dtype))
        known = {name for name, *_ in lapack.registrations()["cpu"]}
    except (AttributeError, KeyError, TypeError):
        return None
    return target if target in known else None


@jax.custom_batching.sequential_vmap
def symmetric_eigenvalues(gram: Float[Array, "N N"], active: Bool[Array, ""]) -> Float[Array, " N"]:
    """Descending eigenvalues of a positive semi-definite matrix; zeros where not active.

    The loop under `vmap` is meant: batched solvers on CPU wait inside the pool that runs them.
    """
    target = eigenvalue_kernel(gram.dtype)

    def values(a: Float[Array, "N N"]) -> Float[Array, " N"]:
        cpu = jnp.linalg.eigvalsh if target is None else functools.partial(_values_only, target)
        return jax.lax.platform_dependent(a, cpu=cpu, default=jnp.linalg.eigvalsh)[::-1]

    return jax.lax.cond(active, values, lambda a: jnp.zeros(a.shape[:1], a.dtype), gram)


class PrefixSpectra:
    """Singular values of the first n of `states`' rows, for any n, after centring those n."""

    def __init__(self, states: Float[Array, "T D"], gram: Float[Array, "S S"] | None = None):
        """Takes anchored rows (inputs.anchor), zero past the valid ones, and their Gram matrix."""
        short = states[: min(states.shape)]
        self.states = states
        self._gram = _product(short, short.T) if gram is None else gram  # S = min(T, D)

    def part(self, start: Int[Array, ""], size: int) -> PrefixSpectra:
        """Spectra of the prefixes of `size` rows from `start` on."""
        states = jax.lax.dynamic_slice_in_dim(self.states, start, size)
        if self.states.shape[0] > self.states.shape[1]:
            return PrefixSpectra(states)
        return PrefixSpectra(states, jax.lax.dynamic_slice(self._gram, (start, start), (size,) * 2))

    def __call__(
        self, size: int, num_rows: Int[Array, ""], active: Bool[Array, ""], dtype: np.dtype
    ) -> Float[Array, " S"]:
        """Descending singular values of the first `num_rows` rows, num_rows <= size, float32.

        Args:
          size: static number of rows the decomposition is compiled for.
          num_rows: how many of them this prefix has.
          active: False skips the decomposition and returns zeros.
          dtype: of the decomposition; the rest has that of the states.
        """
        width = self.states.shape[1]
        valid = jnp.arange(size) < num_rows
        count = jnp.maximum(num_rows, 1).astype(self.states.dtype)
        if size <= width:
            both = valid[:, None] & valid[None]
            gram = jnp.where(both, self._gram[:size, :size], 0.0)
            mean = jnp.sum(gram, axis=1, keepdims=True) / count  # [N, 1]
            centred = gram - mean - mean.T + jnp.sum(mean, keepdims=True) / count
            centred = jnp.where(both, centred, 0.0)
        else:
            rows = self.states[:size]
            mean = jnp.sum(jnp.where(valid[:, None], rows, 0.0), axis=0, keepdims=True) / count
            rows = jnp.where(valid[:, None], rows - mean, 0.0)
            centred = _product(rows.T, rows)
        eigenvalues = symmetric_eigenvalues(centred.astype(dtype), active)
        # Centring takes one dimension: a value past min(T - 1, D) is rounding.
        rank_bound = jnp.minimum(num_rows - 1, width)
        floor = FLOOR_EPSILONS * jnp.finfo(dtype).eps * jnp.max(eigenvalues, initial=0.0)
        real = (jnp.arange(eigenvalues.shape[0]) < rank_bound) & (eigenvalues > floor)
        return jnp.sqrt(jnp.where(real, eigenvalues, 0.0)).astype(jnp.float32)


@functools.lru_cache(maxsize=256)
def one_by_one(function: Callable, **static: Hashable) -> Callable:
    """Lets a function of arrays use float64 inside, whatever batches or traces it.

    Its arguments and results are of 32 bits or less, `static` its keyword arguments. Float64 is in
    scope while it is traced only: `vmap` must not look inside, and gets a loop; a call outside jit
    must not go op by op, and finds what an earlier one compiled.
    """
    jitted = jax.jit(functools.partial(function, **static))

    @jax.custom_batching.sequential_vmap
    def scoped(*args):
        with jax.enable_x64(True):
            return jitted(*args)

    return scoped


def _values_only(target: str, a: Float[Array, "N N"]) -> Float[Array, " N"]:
    """Ascending eigenvalues without the vectors, which eigvalsh makes and drops: half the time."""
    values = jax.ShapeDtypeStruct(a.shape[:1], a.dtype)
    call = jax.ffi.ffi_call(
        target,
        (jax.ShapeDtypeStruct(a.shape, a.dtype), values, jax.ShapeDtypeStruct((), jnp.int32)),
        input_layouts=[(0, 1)],
        output_layouts=[(0, 1), (0,), ()],
        input_output_aliases={0: 0},
    )
    return call(a, mode=np.uint8(ord("N")), uplo=np.uint8(ord("L")))[1]


def _product(a: Float[Array, "M K"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    """Product in full precision also where the accelerator would round its inputs."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
