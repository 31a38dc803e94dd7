"""Sums over the singular values of all prefixes of a response, without their decompositions.

Row k + 1 has the contrast c_k = sqrt(k / (k + 1)) (mean of the first k rows - row k + 1). These
are orthonormal combinations of the rows (Helmert), so the first t - 1 contrasts have the singular
values of the first t rows, centred. Let G be the Gram matrix of the contrasts. That of a prefix is
a leading block of G, and its Cholesky factor is one of that of G. One factorisation of G + s I
therefore gives, for every prefix of t rows with eigenvalues lambda,

  sum log(1 + lambda / s) = log det(I + G_(t-1) / s) = sum_{i<t} log(L_ii^2 / s).

Fixed combinations of these sums for a few shifts s, and of the trace, are close to sum sigma and
sum sigma log sigma, which is all that effective rank needs. An eigenvalue of zero adds nothing.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from semrl_jax.metrics.spectrum import cholesky_factor

# The fits cover eigenvalues up to this multiple of the estimate of the largest; nothing checks it.
# At twice this multiple, sigma has a relative error of 5e-4 and sigma log sigma one of 2e-3.
LARGEST = 1.5
# From this shift s on, the rounding error of factorising G + s I in float32 is far below s.
FLOAT32_FROM = 5e-5
POWER_STEPS = 12
# What is left of the power method's error for a flat spectrum.
POWER_MARGIN = 1.3
# If all but this share of the eigenvalues exceed a shift, smaller shifts add nothing new.
CONVERGED = 0.02


# Shifts, relative to the largest eigenvalue, whose sums of log(1 + lambda / s) give sums of sigma.
# They minimise the errors for any spectrum: 1.5e-5 of sigma and 5e-5 of sigma log sigma.
SHIFTS = (
    1.8, 0.24, 4.3e-2, 8.2e-3, 1.6e-3, 3.2e-4, 6.3e-5, 1.3e-5,
    2.6e-6, 5e-7, 9.4e-8, 1.6e-8, 2.4e-9, 3.1e-10, 2.9e-11, 4.9e-13,
)  # fmt: skip
SMALLEST = 1e-11  # the smallest eigenvalue that is covered, relative to the largest
# Above this share of the largest sigma the errors are relative, below absolute.
RELATIVE_FROM = 1e-3


class SpectralSums(NamedTuple):
    """Sums over the singular values sigma of each prefix of t = 1, 2, ... rows, centred."""

    total: Float[Array, " T"]  # sum sigma
    weighted: Float[Array, " T"]  # sum sigma log sigma
    count: Float[Array, " T"]  # how many sigma exceed 1e-6 of the response's largest
    # A bound of the sum of those far below, which `total` lacks; NaN if a factorisation failed.
    unresolved: Float[Array, " T"]


@functools.cache
def fitted_weights() -> Float[np.ndarray, "N 2"]:
    """Weights of log(1 + x / s) per shift, then of x, for sqrt(x) and sqrt(x) log sqrt(x)."""
    x = np.geomspace(SMALLEST, LARGEST, 1000)
    sigma = np.sqrt(x)
    terms = np.column_stack([np.log1p(x[:, None] / np.array(SHIFTS)), x])
    targets = np.stack([sigma, sigma * np.log(sigma)], axis=1)
    scale = np.maximum(sigma, RELATIVE_FROM)[:, None]
    return np.linalg.lstsq(terms / scale, targets / scale, rcond=1e-13)[0]


def prefix_sums(
    gram: Float[Array, "T T"], num_rows: Int[Array, ""], width: Int[Array, ""] | int, first: int
) -> SpectralSums:
    """Float64 sums over the spectra of all centred prefixes.

    Args:
      gram: float64 Z Z^T of rows Z, zero past `num_rows`. A common offset of the rows must not be
        much larger than their scatter.
      num_rows: valid rows.
      width: D, the width of the rows: a prefix has at most min(t - 1, D) directions.
      first: the shortest prefix that is used; entries of shorter ones have larger errors.
    """
    tokens = jnp.arange(1, gram.shape[0] + 1)
    used = (tokens >= first) & (tokens <= num_rows)
    directions = jnp.minimum(tokens - 1, width).astype(gram.dtype)
    gram, largest = _scaled_contrasts(gram, num_rows)
    single = gram.astype(jnp.float32)

    weights = fitted_weights()
    values = weights[-1][:, None] * _of_prefixes(jnp.diagonal(gram))[None]
    earlier: list[tuple[float, Array]] = []
    done = jnp.bool_(False)
    for shift, weight in zip(SHIFTS, weights):

        def factorise(shift=shift):
            matrix = single if shift >= FLOAT32_FROM else gram
            shift = jnp.asarray(shift, matrix.dtype)
            factor = cholesky_factor(matrix + shift * jnp.eye(len(matrix), dtype=matrix.dtype))
            pivots = 2 * jnp.log(jnp.diagonal(factor)) - jnp.log(shift)  # log(L_ii^2 / shift)
            return _of_prefixes(pivots.astype(jnp.float64))

        if len(earlier) < 2:
            log_dets = factorise()
        else:
            (before, at_before), (last, at_last) = earlier[-2:]
            interval = np.log(before / last)
            missing = directions - (at_last - at_before) / interval
            # sum 1 / lambda, if every lambda is far above the shifts
            inverse = missing * interval / (before - last)
            done |= jnp.all(jnp.where(used, jnp.abs(missing) <= CONVERGED * directions, True))

            def extend(at_last=at_last, last=last, inverse=inverse, shift=shift):
                return at_last + directions * np.log(last / shift) - inverse * (last - shift)

            log_dets = jax.lax.cond(done, extend, factorise)
        earlier.append((shift, log_dets))
        values += weight[:, None] * log_dets[None]
    # The slope in log s is the number of eigenvalues above s. If it still grows by n at the last
    # shift, the smaller eigenvalues add up to about n s, and Cauchy-Schwarz bounds their roots.
    slopes = [(b - a) / np.log(s / t) for (s, a), (t, b) in itertools.pairwise(earlier[-3:])]
    grown = jnp.maximum(slopes[1] - slopes[0], 0.0)
    others = jnp.maximum(directions - slopes[0], 0.0)
    (before, _), (last, _) = earlier[-2:]
    below = jnp.sqrt(others * grown * (np.log(before / last) * last))
    total, weighted = values
    root = jnp.sqrt(largest)  # the sums are over spectra divided by `largest`
    return SpectralSums(
        total=root * total,
        weighted=root * (weighted + total * jnp.log(root)),
        count=slopes[1],
        unresolved=root * below,
    )


def _scaled_contrasts(
    gram: Float[Array, "T T"], num_rows: Int[Array, ""]
) -> tuple[Float[Array, "N N"], Float[Array, ""]]:
    """The Gram matrix of the T - 1 contrasts, divided by about its largest eigenvalue; and that."""
    size = gram.shape[0]
    gram = _contrasts(_contrasts(gram).T)
    valid = jnp.arange(1, size) < num_rows
    gram = jnp.where(valid[:, None] & valid[None], gram, 0.0)
    unit = _positive(jnp.max(jnp.diagonal(gram), initial=0.0))
    gram = gram / unit  # so that squares stay in the range of float32
    largest = _positive(_largest_eigenvalue(gram.astype(jnp.float32)))
    largest = POWER_MARGIN * largest.astype(gram.dtype)
    return gram / largest, largest * unit


def _contrasts(rows: Float[Array, "T K"]) -> Float[Array, "N K"]:
    """The T - 1 contrasts."""
    count = jnp.arange(1, len(rows), dtype=rows.dtype)[:, None]
    means = jax.lax.associative_scan(jnp.add, rows[:-1]) / count
    return jnp.sqrt(count / (count + 1)) * (means - rows[1:])


def _of_prefixes(of_contrasts: Float[Array, "*B N"]) -> Float[Array, "*B T"]:
    """Sums over the contrasts of each prefix; the first prefix has none."""
    sums = jnp.cumsum(of_contrasts, axis=-1)
    return jnp.concatenate([jnp.zeros_like(sums[..., :1]), sums], axis=-1)


def _largest_eigenvalue(gram: Float[Array, "N N"]) -> Float[Array, ""]:
    """An estimate from below: by the power method, and the mean of all, weighted by their size."""

    def step(_, state):
        product = jnp.matmul(gram, state[0], precision=jax.lax.Precision.HIGHEST)
        length = jnp.sqrt(jnp.sum(product**2))
        return product / _positive(length), length

    start = jnp.cos(jnp.arange(gram.shape[0], dtype=gram.dtype) ** 2)
    start /= jnp.sqrt(jnp.maximum(jnp.sum(start**2), 1.0))
    found = jax.lax.fori_loop(0, POWER_STEPS, step, (start, jnp.zeros((), gram.dtype)))[1]
    return jnp.maximum(found, jnp.sum(gram**2) / _positive(jnp.trace(gram)))


def _positive(x: Float[Array, ""]) -> Float[Array, ""]:
    """A divisor: 1.0 for zero."""
    return jnp.where(x > 0, x, 1.0)
