"""Matrix entropy: the Renyi entropy of the eigenvalues of K / trace K, with K = Z Z^T.

q_k = sigma_k^2 / sum sigma^2,  S_a = log(sum q_k^a) / (1 - a)

sigma are the singular values of the valid rows Z, not centred. The metric of the package has order
a = 1, the von Neumann entropy -sum q log q. `metric_of_order` makes those of other orders, such as
2, the collision entropy.

In nats in [0, log min(T, D)]; 0.0 if T < 2 or if all rows are zero.

Source: arXiv:1211.2459; arXiv:2502.02013 for the hidden states of a prompt.
"""

from __future__ import annotations

import functools
import math
import numbers

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from semrl_jax.metrics.metric import Metric

NEAR_ONE = 0.1  # orders this close to 1 take the form that keeps the digits there


@functools.cache
def metric_of_order(order: float | int) -> Metric:
    """The metric of an order above 0, for a module that logs it: `METRIC = metric_of_order(2)`."""
    is_number = isinstance(order, numbers.Real) and not isinstance(order, bool)
    if not is_number or math.isnan(order) or order <= 0:
        raise ValueError(f"order={order!r} must be a number above 0, or infinity.")
    of_spectrum = functools.partial(matrix_entropy_of, order=float(order))
    return Metric(of_spectrum=of_spectrum, centred=False, min_tokens=2)


def matrix_entropy_of(
    sigma: Float[Array, " S"],
    scale: Float[Array, ""],
    num_rows: Int[Array, ""],
    width: int,
    *,
    order: float,
) -> Float[Array, ""]:
    """Renyi entropy of the squares of a spectrum; sigma in any unit."""
    largest = jnp.max(sigma, initial=0.0)
    eigenvalues = (sigma / jnp.where(largest > 0, largest, 1.0)) ** 2
    total = jnp.sum(eigenvalues)
    entropy = renyi_entropy(eigenvalues / jnp.where(total > 0, total, 1.0), order)
    return jnp.where(num_rows >= 2, entropy, 0.0)


def renyi_entropy(q: Float[Array, " S"], order: float) -> Float[Array, ""]:
    """Computes log(sum q^a) / (1 - a) in nats, for shares q that sum to one; zeros add nothing.

    Order 1 is its limit, the Shannon entropy. Order infinity is -log(max q). 0.0 if all q are zero.
    """
    positive = q > 0
    log_q = jnp.log(jnp.where(positive, q, 1.0))
    if order == 1:
        entropy = jnp.sum(q * log_q)
    elif math.isinf(order):
        entropy = jnp.max(jnp.where(positive, log_q, -jnp.inf), initial=-jnp.inf)
    elif abs(order - 1.0) < NEAR_ONE:
        # sum q^a = 1 + sum q (q^(a-1) - 1). log1p takes the second term without rounding it away.
        excess = jnp.sum(q * jnp.expm1((order - 1.0) * log_q))
        return jnp.abs(jnp.log1p(excess)) / abs(order - 1.0)  # 0.0, never -0.0
    else:
        powers = jax.nn.logsumexp(jnp.where(positive, order * log_q, -jnp.inf))
        entropy = powers / (order - 1.0)
    return jnp.where(jnp.any(positive), jnp.abs(entropy), 0.0)


METRIC = metric_of_order(1.0)
