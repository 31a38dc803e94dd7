"""Singular values of the centred prefixes of one response, from one shared Gram matrix.

With rows Z shifted by a common vector, G = Z Z^T is formed once. The eigenvalues of J G[:n, :n] J,
where J subtracts the mean, are the squares of the singular values of the first n rows, centred. A
prefix longer than D takes the D x D scatter matrix instead, which grows with the prefix. Squaring
halves the number of correct digits, which still leaves float64 more than a float32 SVD has.
Float32 loses values below a floor, and reports whether the others are enough. If one value is
so large that float64 would lose the small ones, the rows themselves are decomposed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

try:
    from jaxlib import lapack
except ImportError:  # not public; eigvalsh replaces it, but computes unused vectors too
    lapack = None

# If the true eigenvalue is zero, rounding leaves about one epsilon of the largest, and there may be
# hundreds of these. The floor is four epsilons: sigma = 7e-4 sigma_max in float32.
FLOOR_EPSILONS = 4
# Above this share of sigma_max a float32 value has an error of at most 6 %, with either sign, even
# if one direction is much larger than all others. Smaller values do no harm if their sum is a small
# part of all.
RESOLVED_SIGMA = 1e-3
MAX_UNRESOLVED_SHARE = 1e-4
# Centring subtracts count * |mean row|^2, whose rounding stays. The errors above hold if that is at
# most this multiple of the largest eigenvalue. It is 3.3 times that eigenvalue for random walks.
MAX_OFFSET = 4
# Above this share a float64 value has an error of 1e-6: FLOOR_EPSILONS / 2 epsilons / its square.
RESOLVED_SIGMA_FLOAT64 = 3e-5

MAX_UNSPLIT_ROWS = 384  # up to here, splitting a symmetric product saves no time


class Spectrum(NamedTuple):
    """Descending singular values of a prefix, and whether the arithmetic resolved them."""

    sigma: Float[Array, " S"]
    resolved: Bool[Array, ""]


class Scatter(NamedTuple):
    """Sum of z z^T over the first `num_rows` rows z; num_rows is static."""

    num_rows: int
    matrix: Float[Array, "D D"]


def eigenvalue_kernel(dtype: np.dtype) -> str | None:
    """Name of LAPACK's symmetric eigenvalue kernel in this jaxlib; None if it has none."""
    try:
        target = lapack.prepare_lapack_call("syevd_ffi", np.dtype(dtype))
        known = {name for name, *_ in lapack.registrations()["cpu"]}
    except (AttributeError, KeyError, TypeError):
        return None
    return target if target in known else None


@jax.custom_batching.custom_vmap
def symmetric_eigenvalues(gram: Float[Array, "N N"], active: Bool[Array, ""]) -> Float[Array, " N"]:
    """Descending eigenvalues of a positive semi-definite matrix; zeros where not active.

    Under `vmap` a CPU decomposes one matrix after the other, because a batched solver would wait
    inside the thread pool that runs it. An accelerator decomposes all at once, also those that are
    not active.
    """
    target = eigenvalue_kernel(gram.dtype)

    def values(a):
        cpu = jnp.linalg.eigvalsh if target is None else functools.partial(_values_only, target)
        return jax.lax.platform_dependent(a, cpu=cpu, default=jnp.linalg.eigvalsh)[::-1]

    return jax.lax.cond(active, values, lambda a: jnp.zeros_like(a[0]), gram)


@symmetric_eigenvalues.def_vmap
def _batch_of_eigenvalues(
    axis_size: int, in_batched: list[bool], gram: Array, active: Array
) -> tuple[Float[Array, "B N"], bool]:
    gram, active = _with_axis(axis_size, in_batched, (gram, active))

    def in_turn(gram, active):
        return jax.lax.map(lambda pair: symmetric_eigenvalues(*pair), (gram, active))

    def at_once(gram, active):
        values = jnp.linalg.eigvalsh(jnp.where(active[:, None, None], gram, 0.0))
        return values[:, ::-1]

    return jax.lax.platform_dependent(gram, active, cpu=in_turn, default=at_once), True


@jax.custom_batching.custom_vmap
def cholesky_factor(matrix: Float[Array, "N N"]) -> Float[Array, "N N"]:
    """Lower triangle L of a positive definite matrix L L^T; NaN if it is not. Reads the lower half.

    Under `vmap` a CPU factorises one after the other, for the reason `symmetric_eigenvalues` has.
    """
    return jax.lax.linalg.cholesky(matrix, symmetrize_input=False)


@cholesky_factor.def_vmap
def _batch_of_factors(
    axis_size: int, in_batched: list[bool], matrix: Array
) -> tuple[Float[Array, "B N N"], bool]:
    at_once = functools.partial(jax.lax.linalg.cholesky, symmetrize_input=False)
    in_turn = functools.partial(jax.lax.map, cholesky_factor)
    return jax.lax.platform_dependent(matrix, cpu=in_turn, default=at_once), True


@jax.custom_batching.sequential_vmap
def singular_values(
    rows: Float[Array, "N D"],
    num_rows: Int[Array, ""],
    active: Bool[Array, ""],
    centred: Bool[Array, ""],
) -> Float[Array, " S"]:
    """Descending singular values from the first rows themselves, slowly; zeros where not active."""

    def values(rows, num_rows, centred):
        valid = (jnp.arange(rows.shape[0]) < num_rows)[:, None]
        total = jnp.sum(jnp.where(valid, rows, 0.0), axis=0, keepdims=True)
        mean = total / jnp.maximum(num_rows, 1).astype(rows.dtype)
        offset = jnp.where(centred, mean, 0.0)
        return jnp.linalg.svd(jnp.where(valid, rows - offset, 0.0), compute_uv=False)

    def zeros(rows, *_):
        return jnp.zeros_like(rows[0, 0], shape=(min(rows.shape),))

    return jax.lax.cond(active, values, zeros, rows, num_rows, centred)


class PrefixSpectra:
    """Singular values of the first n rows of `states`, centred unless told otherwise, for any n."""

    def __init__(
        self,
        states: Float[Array, "T D"],
        gram: Float[Array, "S S"] | None = None,
        *,
        centred: bool = True,
    ):
        """Takes rows, zero after the valid ones, `anchor`ed if centred, and their Gram matrix."""
        self.states = states
        self._centred = centred
        self._gram = symmetric_product(states[: min(states.shape)]) if gram is None else gram

    def part(self, start: Int[Array, ""], size: int) -> PrefixSpectra:
        """Spectra of the prefixes of the `size` rows from `start` on."""
        states = jax.lax.dynamic_slice_in_dim(self.states, start, size)
        if self.states.shape[0] > self.states.shape[1]:
            return PrefixSpectra(states, centred=self._centred)
        gram = jax.lax.dynamic_slice(self._gram, (start, start), (size,) * 2)
        return PrefixSpectra(states, gram, centred=self._centred)

    def scatter(self, num_rows: int, before: Scatter | None = None) -> Scatter:
        """Scatter matrix of the first `num_rows` rows, made from one of fewer rows if given."""
        width = self.states.shape[1]
        before = before or Scatter(0, jnp.zeros((width, width), self.states.dtype))
        added = symmetric_product(self.states[before.num_rows : num_rows].T)
        return Scatter(num_rows, before.matrix + added)

    def __call__(
        self,
        size: int,
        num_rows: Int[Array, ""],
        active: Bool[Array, ""],
        *,
        strict: bool = False,
        exact: bool = False,
        before: Scatter | None = None,
    ) -> Spectrum:
        """Descending singular values of the first `num_rows` rows, num_rows <= size.

        Args:
          size: static number of rows the decomposition is compiled for.
          num_rows: how many of them this prefix has.
          active: False skips the decomposition and returns zeros, resolved.
          strict: unresolved if a single value is, as counting values requires.
          exact: in float64, take an SVD where a value is unresolved.
          before: scatter matrix of rows that every prefix of this call has; saves their products.
        """
        dtype, width = self.states.dtype, self.states.shape[1]
        valid = jnp.arange(size) < num_rows
        count = jnp.maximum(num_rows, 1).astype(dtype)
        offset = jnp.zeros((), dtype)  # known only for at most D rows; errors beyond are small
        if size <= width:
            both = valid[:, None] & valid[None]
            gram = jnp.where(both, self._gram[:size, :size], 0.0)
            if self._centred:
                mean = jnp.sum(gram, axis=1, keepdims=True) / count  # [N, 1]
                offset = jnp.sum(mean)
                gram = gram - mean - mean.T + offset / count
                gram = jnp.where(both, gram, 0.0)
        else:
            before = before or self.scatter(0)
            rows = jnp.where(valid[:, None], self.states[:size], 0.0)
            total = jnp.sum(rows, axis=0, keepdims=True)  # [1, D]
            scatter = before.matrix + symmetric_product(rows[before.num_rows :].T)
            gram = scatter - total.T * (total / count) if self._centred else scatter
        eigenvalues = symmetric_eigenvalues(gram, active)
        # Centring removes one dimension: values after the first min(T - 1, D) are rounding.
        most = num_rows - 1 if self._centred else num_rows
        real = jnp.arange(eigenvalues.shape[0]) < jnp.minimum(most, width)
        largest = jnp.max(eigenvalues, initial=0.0)
        rounded = jnp.maximum(largest, offset / MAX_OFFSET)  # rounding is relative to this
        floor = FLOOR_EPSILONS * jnp.finfo(dtype).eps * rounded
        sigma = jnp.sqrt(jnp.where(real & (eigenvalues > floor), eigenvalues, 0.0))
        if dtype == jnp.float64:
            resolved = jnp.bool_(True)
            if exact:
                small = real & (eigenvalues < RESOLVED_SIGMA_FLOAT64**2 * rounded)
                again = active & jnp.any(small)
                is_centred = jnp.bool_(self._centred)
                of_rows = singular_values(self.states[:size], num_rows, again, is_centred)
                sigma = jnp.where(again, jnp.where(real, of_rows, 0.0), sigma)
        else:
            # So that max(T, D) eps, the threshold of traditional rank, is at most half of this.
            eps, tiny = float(jnp.finfo(dtype).eps), float(jnp.finfo(dtype).tiny)
            share = jnp.maximum(RESOLVED_SIGMA, 2 * eps * jnp.maximum(count, width))
            unresolved = jnp.sum(real & (eigenvalues < share**2 * rounded), dtype=dtype)
            lost = unresolved * share * jnp.sqrt(rounded)
            enough = lost <= (0.0 if strict else MAX_UNRESOLVED_SHARE) * jnp.sum(sigma)
            # Products below `tiny` were lost. Is their sum below a rounding of the largest?
            kept = largest >= count * (width * tiny / eps)
            resolved = ~active | (enough & kept)
        return Spectrum(sigma, resolved)


def symmetric_product(rows: Float[Array, "N K"]) -> Float[Array, "N N"]:
    """rows rows^T in full precision; products above the diagonal are copied from below."""
    num_rows = rows.shape[0]
    if num_rows <= MAX_UNSPLIT_ROWS:
        return _product(rows, rows.T)
    first, second = rows[: num_rows // 2], rows[num_rows // 2 :]
    corner = _product(second, first.T)
    return jnp.block([[symmetric_product(first), corner.T], [corner, symmetric_product(second)]])


@functools.lru_cache(maxsize=256)
def with_float64(function: Callable, *, batched: bool = False, **static: Hashable) -> Callable:
    """Lets a function of arrays use float64 inside, also under `jit` and `vmap`.

    Its arguments and results have at most 32 bits; `static` are its keyword arguments. Float64 is
    enabled only while the function is traced, so `vmap` must not trace it again: `vmap` runs a loop
    over calls or, with `batched`, one call with `over_batch=True` and a leading axis on all arrays.
    The jitted function is cached, so that calls outside jit compile once.
    """
    jitted = jax.jit(functools.partial(function, **static))

    def scoped(*args):
        with jax.enable_x64(True):
            return jitted(*args)

    if not batched:
        return jax.custom_batching.sequential_vmap(scoped)
    scoped = jax.custom_batching.custom_vmap(scoped)

    @scoped.def_vmap
    def of_batch(axis_size, in_batched, *args):
        args = _with_axis(axis_size, in_batched, args)
        found = with_float64(function, **static, over_batch=True)(*args)
        return found, jax.tree.map(lambda _: True, found)

    return scoped


def _with_axis(axis_size: int, in_batched: Sequence[Any], arrays: tuple[Any, ...]) -> Any:
    """Gives a leading batch axis to the arrays that have none."""
    return jax.tree.map(
        lambda x, batched: x if batched else jnp.broadcast_to(x, (axis_size, *x.shape)),
        arrays,
        tuple(in_batched),
    )


def _values_only(target: str, a: Float[Array, "N N"]) -> Float[Array, " N"]:
    """Ascending eigenvalues without vectors, in half the time of eigvalsh, which computes both."""
    values = jax.ShapeDtypeStruct(a.shape[:1], a.dtype)
    call = jax.ffi.ffi_call(
        target,
        (jax.ShapeDtypeStruct(a.shape, a.dtype), values, jax.ShapeDtypeStruct((), jnp.int32)),
        input_layouts=[(0, 1)],
        output_layouts=[(0, 1), (0,), ()],
        input_output_aliases={0: 0},
    )
    values = call(a, mode=np.uint8(ord("N")), uplo=np.uint8(ord("L")))[1]
    # The results of a custom call do not have the shard_map axes that `a` varies over; these do.
    return jnp.where(True, values, a[0])


def _product(a: Float[Array, "M K"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    """Product in full precision, also on accelerators that round inputs by default."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
