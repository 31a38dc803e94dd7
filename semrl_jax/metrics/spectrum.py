"""Singular values of the centred prefixes of one response, from one shared Gram matrix.

With rows Z shifted by a common vector, G = Z Z^T is formed once; the eigenvalues of J G[:n, :n] J,
where J subtracts the mean, are the squares of the singular values of the first n rows, centred. A
prefix longer than D takes the D x D scatter matrix instead, which grows with the prefix. Squaring
halves the digits: float64 keeps those of a float32 decomposition and more, float32 those above its
floor, and says whether that was enough. What float64 would lose beside a huge direction, an SVD of
the rows themselves keeps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

try:
    from jaxlib import lapack
except ImportError:  # not public: without it eigvalsh serves, which makes vectors nobody reads
    lapack = None

# Rounding leaves eigenvalues of about one epsilon of the largest where true ones are zero, and
# there may be hundreds: four epsilons are the floor, sigma = 7e-4 sigma_max in float32.
FLOOR_EPSILONS = 4
# Above this share of sigma_max a float32 value is good for 6 % even beside one huge direction, with
# either sign; a few below are harmless where the others together outweigh them.
RESOLVED_SIGMA = 1e-3
MAX_UNRESOLVED_SHARE = 1e-4
# Above this one a float64 value is good for 1e-6: FLOOR_EPSILONS / 2 epsilons over its square.
RESOLVED_SIGMA_FLOAT64 = 3e-5

MAX_UNSPLIT_ROWS = 384  # smaller products lose more speed than half of them is worth


class Spectrum(NamedTuple):
    """Descending singular values of a prefix, and whether the arithmetic could tell them."""

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

    Under `vmap` a CPU takes them one by one: batched solvers wait there inside the pool that runs
    them. An accelerator takes them at once, the ones that are not active too.
    """
    target = eigenvalue_kernel(gram.dtype)

    def values(a: Float[Array, "N N"]) -> Float[Array, " N"]:
        cpu = jnp.linalg.eigvalsh if target is None else functools.partial(_values_only, target)
        return jax.lax.platform_dependent(a, cpu=cpu, default=jnp.linalg.eigvalsh)[::-1]

    return jax.lax.cond(active, values, lambda a: jnp.zeros_like(a[0]), gram)


@symmetric_eigenvalues.def_vmap
def _batch_of_eigenvalues(
    axis_size: int, in_batched: list[bool], gram: Array, active: Array
) -> tuple[Float[Array, "B N"], bool]:
    gram, active = (
        x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        for x, batched in zip((gram, active), in_batched)
    )

    def in_turn(gram: Float[Array, "B N N"], active: Bool[Array, " B"]) -> Float[Array, "B N"]:
        return jax.lax.map(lambda pair: symmetric_eigenvalues(*pair), (gram, active))

    def at_once(gram: Float[Array, "B N N"], active: Bool[Array, " B"]) -> Float[Array, "B N"]:
        values = jnp.linalg.eigvalsh(jnp.where(active[:, None, None], gram, 0.0))
        return values[:, ::-1]

    return jax.lax.platform_dependent(gram, active, cpu=in_turn, default=at_once), True


@jax.custom_batching.custom_vmap
def singular_values(
    rows: Float[Array, "N D"], num_rows: Int[Array, ""], active: Bool[Array, ""]
) -> Float[Array, " S"]:
    """Descending singular values of the first rows, centred; zeros where not active.

    Of the rows themselves: an order slower than eigenvalues. `vmap` as there.
    """

    def values(rows: Float[Array, "N D"], num_rows: Int[Array, ""]) -> Float[Array, " S"]:
        valid = (jnp.arange(rows.shape[0]) < num_rows)[:, None]
        total = jnp.sum(jnp.where(valid, rows, 0.0), axis=0, keepdims=True)
        mean = total / jnp.maximum(num_rows, 1).astype(rows.dtype)
        return jnp.linalg.svd(jnp.where(valid, rows - mean, 0.0), compute_uv=False)

    def zeros(rows: Float[Array, "N D"], num_rows: Int[Array, ""]) -> Float[Array, " S"]:
        return jnp.zeros_like(rows[0, 0], shape=(min(rows.shape),))

    return jax.lax.cond(active, values, zeros, rows, num_rows)


@singular_values.def_vmap
def _batch_of_singular_values(
    axis_size: int, in_batched: list[bool], *batch: Array
) -> tuple[Float[Array, "B S"], bool]:
    batch = tuple(
        x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        for x, batched in zip(batch, in_batched)
    )
    return jax.lax.map(lambda one: singular_values(*one), batch), True


class PrefixSpectra:
    """Singular values of the first n of `states`' rows, for any n, after centring those n."""

    def __init__(self, states: Float[Array, "T D"], gram: Float[Array, "S S"] | None = None):
        """Takes anchored rows (inputs.anchor), zero past the valid ones, and their Gram matrix."""
        self.states = states
        self._gram = symmetric_product(states[: min(states.shape)]) if gram is None else gram

    def part(self, start: Int[Array, ""], size: int) -> PrefixSpectra:
        """Spectra of the prefixes of `size` rows from `start` on."""
        states = jax.lax.dynamic_slice_in_dim(self.states, start, size)
        if self.states.shape[0] > self.states.shape[1]:
            return PrefixSpectra(states)
        return PrefixSpectra(states, jax.lax.dynamic_slice(self._gram, (start, start), (size,) * 2))

    def scatter(self, num_rows: int, before: Scatter | None = None) -> Scatter:
        """Scatter matrix of the first `num_rows` rows, from one of fewer rows."""
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
          strict: unresolved if a single value is, as a count of values needs.
          exact: in float64, takes an SVD where a value is unresolved.
          before: of rows that every prefix of this call has, saves their products.
        """
        dtype, width = self.states.dtype, self.states.shape[1]
        valid = jnp.arange(size) < num_rows
        count = jnp.maximum(num_rows, 1).astype(dtype)
        if size <= width:
            both = valid[:, None] & valid[None]
            gram = jnp.where(both, self._gram[:size, :size], 0.0)
            mean = jnp.sum(gram, axis=1, keepdims=True) / count  # [N, 1]
            centred = gram - mean - mean.T + jnp.sum(mean, keepdims=True) / count
            centred = jnp.where(both, centred, 0.0)
        else:
            before = before or self.scatter(0)
            rows = jnp.where(valid[:, None], self.states[:size], 0.0)
            total = jnp.sum(rows, axis=0, keepdims=True)  # [1, D]
            scatter = before.matrix + symmetric_product(rows[before.num_rows :].T)
            centred = scatter - total.T * (total / count)
        eigenvalues = symmetric_eigenvalues(centred, active)
        # Centring takes one dimension: a value past min(T - 1, D) is rounding.
        real = jnp.arange(eigenvalues.shape[0]) < jnp.minimum(num_rows - 1, width)
        largest = jnp.max(eigenvalues, initial=0.0)
        floor = FLOOR_EPSILONS * jnp.finfo(dtype).eps * largest
        sigma = jnp.sqrt(jnp.where(real & (eigenvalues > floor), eigenvalues, 0.0))
        if dtype == jnp.float64:
            resolved = jnp.bool_(True)
            if exact:
                small = real & (eigenvalues < RESOLVED_SIGMA_FLOAT64**2 * largest)
                again = active & jnp.any(small)
                of_rows = singular_values(self.states[:size], num_rows, again)
                sigma = jnp.where(again, jnp.where(real, of_rows, 0.0), sigma)
        else:
            # The threshold of traditional rank, max(T, D) eps, stays half of what is resolved.
            eps, tiny = float(jnp.finfo(dtype).eps), float(jnp.finfo(dtype).tiny)
            share = jnp.maximum(RESOLVED_SIGMA, 2 * eps * jnp.maximum(count, width))
            unresolved = jnp.sum(real & (eigenvalues < share**2 * largest), dtype=dtype)
            lost = unresolved * share * jnp.sqrt(largest)
            enough = lost <= (0.0 if strict else MAX_UNRESOLVED_SHARE) * jnp.sum(sigma)
            # Each product below `tiny` was lost: together less than a rounding of the largest?
            kept = largest >= count * (width * tiny / eps)
            resolved = ~active | (enough & kept)
        return Spectrum(sigma, resolved)


def symmetric_product(rows: Float[Array, "N K"]) -> Float[Array, "N N"]:
    """rows rows^T in full precision, without the products above the diagonal."""
    num_rows = rows.shape[0]
    if num_rows <= MAX_UNSPLIT_ROWS:
        return _product(rows, rows.T)
    first, second = rows[: num_rows // 2], rows[num_rows // 2 :]
    corner = _product(second, first.T)
    return jnp.block([[symmetric_product(first), corner.T], [corner, symmetric_product(second)]])


@functools.lru_cache(maxsize=256)
def with_float64(function: Callable, *, batched: bool = False, **static: Hashable) -> Callable:
    """Lets a function of arrays use float64 inside, whatever batches or traces it.

    Its arguments and results are of 32 bits or less, `static` its keyword arguments. Float64 is in
    scope while it is traced only: `vmap` must not look inside, and gets a loop, or with `batched`
    one call of the function with `batched=True` and a leading axis on all arrays. A call outside
    jit must not go op by op, and finds what an earlier one compiled.
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
        args = jax.tree.map(
            lambda x, has_axis: x if has_axis else jnp.broadcast_to(x, (axis_size, *x.shape)),
            args,
            tuple(in_batched),
        )
        found = with_float64(function, **static, over_batch=True)(*args)
        return found, jax.tree.map(lambda _: True, found)

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
    values = call(a, mode=np.uint8(ord("N")), uplo=np.uint8(ord("L")))[1]
    # A custom call does not say that its results vary over the axes of a shard_map as `a` does.
    return jnp.where(True, values, a[0])


def _product(a: Float[Array, "M K"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    """Product in full precision also where the accelerator would round its inputs."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
