"""Sums and results over the micro-batches of a batch, one after the other in one program.

Arrays of M micro-batches have the shape [M, ...]. Only the first `num_micro`, an argument of the
program, hold tokens: one program serves batches of several sizes, and empty micro-batches cost no
arithmetic. A `part` is every n-th micro-batch, see `programs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from semrl_jax.models import Params
from semrl_jax.support.programs import Part


class Sums(NamedTuple):
    """Sums over micro-batches: the gradient of the parameters, and scalars of the loss."""

    gradient: Params
    scalars: Mapping[str, Float[Array, ""]]


def over_micro_batches(
    function: Callable[[Any], Any],
    inputs: Any,
    num_micro: Int[np.ndarray | Array, ""],
    part: Part | None = None,
) -> Any:
    """Results [M, ...] of a part of the first `num_micro` micro-batches; 0 in the others."""

    def write(index, outputs):
        return put(outputs, function(take(inputs, index)), index)

    return _loop(num_micro, part, write, zeros_of(_stacked_shapes(function, inputs)))


def summed_gradients(
    params: Params,
    loss_of: Callable[[Params, Any], tuple[Float[Array, ""], tuple[Mapping[str, Array], Any]]],
    inputs: Any,
    num_micro: Int[np.ndarray | Array, ""],
    part: Part | None = None,
) -> tuple[Sums, Any]:
    """Gradient and scalars summed over a part of the first `num_micro` micro-batches.

    Of one micro-batch of the `inputs` [M, ...], `loss_of` gives its loss, scalars and a tree of
    arrays [...]. The trees come back as [M, ...], 0 in the other micro-batches.
    """

    def accumulate(index, carry):
        sums, outputs = carry
        with_gradient = jax.value_and_grad(loss_of, has_aux=True)
        (_, (scalars, own)), gradient = with_gradient(params, take(inputs, index))
        return jax.tree.map(jnp.add, sums, (gradient, scalars)), put(outputs, own, index)

    _, (scalars, _) = jax.eval_shape(loss_of, params, take(inputs, 0))
    _, (_, outputs) = _stacked_shapes(functools.partial(loss_of, params), inputs)
    # float32 also for rounded parameters: a sum of many small gradients would stop growing.
    zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), params)
    start = (zeros, zeros_of(scalars)), zeros_of(outputs)
    sums, outputs = _loop(num_micro, part, accumulate, start)
    return Sums(*sums), outputs


def take(tree: Any, index: int | Int[Array, ""]) -> Any:
    """Micro-batch `index` of leaves [M, ...]."""
    at = functools.partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False)
    return jax.tree.map(at, tree)


def put(tree: Any, parts: Any, index: int | Int[Array, ""]) -> Any:
    """Leaves [M, ...] with `parts` as their micro-batch `index`."""
    return jax.tree.map(
        lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, index, 0), tree, parts
    )


def zeros_of(shapes: Any) -> Any:
    """Zeros of the shapes and dtypes of a tree."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def split_rows(tree: Any, micro_batch_size: int) -> Any:
    """[B, ...] leaves to [M, b, ...]; rows m, m + M, ... of micro-batch m need not move."""

    def split(leaf):
        num_micro = leaf.shape[0] // micro_batch_size
        assert num_micro * micro_batch_size == leaf.shape[0], "validated with the config"
        return leaf.reshape(micro_batch_size, num_micro, *leaf.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, tree)


def _stacked_shapes(function: Callable[[Any], Any], inputs: Any) -> Any:
    """Shapes [M, ...] of results, without `jax.vmap`, which `ragged_dot` of experts lacks."""
    count = len(jax.tree.leaves(inputs)[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype),
        jax.eval_shape(lambda inputs: function(take(inputs, 0)), inputs),
    )


def _loop(num_micro, part, step, carry):
    """Carries `step(index, carry)` over the micro-batches of a part."""
    if part is None:
        return jax.lax.fori_loop(0, num_micro, step, carry)
    first, stride = part
    num_steps = (num_micro - first + stride - 1) // stride
    of_part = lambda index, carry: step(first + stride * index, carry)  # noqa: E731
    return jax.lax.fori_loop(0, num_steps, of_part, carry)
