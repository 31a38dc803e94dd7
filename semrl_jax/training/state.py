"""The train state: plain nested dicts of arrays with stable names, and the optimiser."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from semrl_jax.models import Params, from_host, parameter_shardings, replicated
from semrl_jax.shaping import ShapingState


class DataPosition(NamedTuple):
    """Where the next unread prompt is; a pure function of the seed orders each epoch."""

    epoch: int
    cursor: int  # prompts of this epoch already consumed


class TrainState(NamedTuple):
    """Everything a resumed run needs; a pytree that checkpoints see by name.

    Attributes:
      params: float32 policy parameters.
      optimizer: Optax state.
      shaping: the baselines of the indicators.
      step: int32, updates of the loop done so far.
      skipped_in_row: int32, updates skipped since the last good one.
      position: after the last consumed batch of prompts.
    """

    params: Params
    optimizer: Any
    shaping: ShapingState
    step: Int[Array, ""]
    skipped_in_row: Int[Array, ""]
    position: DataPosition


def learning_rate_at(count: Any, *, learning_rate: float, learning_rate_warmup_steps: int) -> Any:
    """Rate of the update after `count` others: constant after a linear warm-up."""
    # (count + 1): the first update already moves.
    warmed = (count + 1) / max(learning_rate_warmup_steps, 1)
    return learning_rate * jnp.minimum(warmed, 1.0)


def num_optimizer_updates(optimizer_state: Any) -> int:
    """Updates made so far; those skipped as non-finite are none."""
    (count,) = (
        node.count
        for node in jax.tree.leaves(optimizer_state, is_leaf=_is_schedule)
        if _is_schedule(node)
    )
    return int(count)


def _is_schedule(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


@functools.cache  # static under jit: equal settings give one program
def make_optimizer(
    *,
    learning_rate: float,
    learning_rate_warmup_steps: int,
    adam_b1: float,
    adam_b2: float,
    weight_decay: float,
    max_grad_norm: float,
) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW at the rate of `learning_rate_at`."""
    rate = functools.partial(
        learning_rate_at,
        learning_rate=learning_rate,
        learning_rate_warmup_steps=learning_rate_warmup_steps,
    )
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.adamw(rate, b1=adam_b1, b2=adam_b2, weight_decay=weight_decay),
    )


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    shaping: ShapingState,
    mesh: Mesh,
) -> TrainState:
    """State before the first update, laid out over the mesh; takes `params` over."""
    params = jax.device_put(params, parameter_shardings(params, mesh))

    def everywhere(value):
        dtype = getattr(value, "dtype", np.int32)
        return from_host(np.asarray(value, dtype), replicated(mesh))

    layout = jax.tree.map(
        lambda leaf: leaf.sharding, abstract_state(params, optimizer, shaping, mesh).optimizer
    )
    return TrainState(
        params=params,
        optimizer=jax.jit(optimizer.init, out_shardings=layout)(params),
        shaping=jax.tree.map(everywhere, shaping),
        step=everywhere(0),
        skipped_in_row=everywhere(0),
        position=DataPosition(0, 0),
    )


def abstract_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    shaping: ShapingState,
    mesh: Mesh,
) -> TrainState:
    """Shapes, dtypes and shardings of a state: what a checkpoint is restored into.

    `params` may be arrays or `Policy.shapes()`; nothing is computed.
    """
    everywhere = replicated(mesh)
    shardings = parameter_shardings(params, mesh)
    optimizer_shapes = jax.eval_shape(optimizer.init, params)
    # Moments lie as their parameters do. Said here, since the first update would otherwise compile
    # for the layout of `init` and the second for that of the first.
    optimizer_shardings = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        optimizer_shapes,
        shardings,
        transform_non_params=lambda _: everywhere,
    )

    def laid_out(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    return TrainState(
        params=jax.tree.map(laid_out, params, shardings),
        optimizer=jax.tree.map(laid_out, optimizer_shapes, optimizer_shardings),
        shaping=jax.tree.map(lambda leaf: laid_out(leaf, everywhere), shaping),
        step=scalar,
        skipped_in_row=scalar,
        position=DataPosition(0, 0),
    )
