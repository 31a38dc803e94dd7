"""The train state: plain nested dicts of arrays with stable names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from semrl_jax.algorithms.algorithm import State
from semrl_jax.algorithms.credit import Memory
from semrl_jax.data.curricula import PromptHistory
from semrl_jax.data.prompts import Position
from semrl_jax.models import Params, from_host, parameter_shardings, replicated
from semrl_jax.shaping import ShapingState
from semrl_jax.training.offload import on_host
from semrl_jax.training.optimizer import Optimizer, rounded

POLICY = "policy"  # name of the first trainee


class DataPosition(NamedTuple):
    """Where the next unread prompt is; a pure function of the seed orders each epoch."""

    epoch: int
    cursor: int  # prompts of this epoch already consumed


class Trained(NamedTuple):
    """A model that is being trained."""

    params: Params  # float32, or the dtype of `Optimizer.param_dtype`
    optimizer: Any  # Optax state, or `WithMasters`


class TrainState(NamedTuple):
    """Everything a resumed run needs; a pytree that checkpoints see by name."""

    params: Params  # of the policy; as `Trained.params`
    optimizer: Any  # as `Trained.optimizer`
    shaping: ShapingState  # the baselines of the indicators
    step: Int[Array, ""]  # int32, updates of the loop done so far
    skipped_in_row: Int[Array, ""]  # int32, updates skipped since the last good one
    position: DataPosition  # after the last consumed batch of prompts
    critic: Trained | None = None  # None if the algorithm has none
    # What the algorithm keeps from step to step; {} if nothing. It is never changed.
    algorithm: State = {}  # noqa: RUF012
    # Parameters of the steps before, oldest first, in the dtype of weight sync; how many says
    # `settings.rollout.num_earlier`. Batches that were sampled with them and not trained on are
    # sampled again after a resume. Before step 0 those of step 0 take their place.
    earlier: tuple[Params, ...] = ()
    # With a curriculum, what was seen of each prompt: `PromptHistory` as a dict of arrays.
    seen: State = {}  # noqa: RUF012

    @property
    def prompts(self) -> Position:
        """How far the prompts are read, in NumPy."""
        seen = PromptHistory(**jax.device_get(self.seen)) if self.seen else None
        return Position(*self.position, seen)

    @property
    def memory(self) -> Memory:
        """What `assign_credit` keeps from step to step."""
        return Memory(self.shaping, self.algorithm)

    def trained(self, name: str) -> Trained:
        """The arrays of a `Trainee`. The policy's arrays have two fields, as in old checkpoints."""
        return Trained(self.params, self.optimizer) if name == POLICY else getattr(self, name)

    def with_trained(self, name: str, trained: Trained) -> TrainState:
        return self._replace(**(trained._asdict() if name == POLICY else {name: trained}))

    def after(self, memory: Memory, position: Position, earlier: tuple[Params, ...]) -> TrainState:
        """The state before the next step, from the state after the update of this step."""
        fields = {**memory._asdict(), "earlier": earlier}
        if position.seen is not None:
            sharding = self.seen["visits"].sharding
            put = functools.partial(from_host, sharding=sharding)
            fields["seen"] = jax.tree.map(put, position.seen._asdict())
        fields["position"] = DataPosition(position.epoch, position.cursor)
        return self._replace(step=self.step + 1, **fields)


def init_state(
    params: Params, optimizer: Optimizer, shaping: ShapingState, mesh: Mesh
) -> TrainState:
    """State before the first update, laid out over the mesh; takes `params` over."""
    return _first(init_trained(params, optimizer, mesh), shaping, mesh, everywhere)


def abstract_state(
    params: Params, optimizer: Optimizer, shaping: ShapingState, mesh: Mesh
) -> TrainState:
    """Shapes, dtypes and shardings of a state, from arrays or shapes: what is restored into."""
    return _first(abstract_trained(params, optimizer, mesh), shaping, mesh, abstract_everywhere)


def _first(policy: Trained, shaping: ShapingState, mesh: Mesh, put: Callable) -> TrainState:
    counts = (put(np.int32(0), mesh) for _ in ("step", "skipped_in_row"))
    return TrainState(*policy, put(shaping, mesh), *counts, DataPosition(0, 0))


def init_trained(params: Params, optimizer: Optimizer, mesh: Mesh) -> Trained:
    """A model before its first update, laid out over the mesh; takes float32 `params` over."""

    def placed(leaf, sharding):
        in_numpy = isinstance(leaf, np.ndarray)
        return from_host(leaf, sharding) if in_numpy else jax.device_put(leaf, sharding)

    params = jax.tree.map(placed, params, parameter_shardings(params, mesh))
    like = abstract_trained(params, optimizer, mesh).optimizer
    layout = jax.tree.map(lambda leaf: leaf.sharding, like)
    state = jax.jit(optimizer.first_state, out_shardings=layout)(params)
    return Trained(rounded(params, optimizer.param_dtype), state)


def abstract_trained(params: Params, optimizer: Optimizer, mesh: Mesh) -> Trained:
    """Shapes, dtypes and shardings of a model and its optimiser state, of float32 arrays."""
    shardings = parameter_shardings(params, mesh)
    shapes = jax.eval_shape(optimizer.first_state, params)
    # Moments lie as their parameters do. Said here, since the first update would otherwise compile
    # for the layout of `init`, and the second again for the layout that the first one gives.
    state_shardings = optax.tree.map_params(
        optimizer.first_state,
        lambda leaf, param, sharding: _like_parameter(leaf.shape, param.shape, sharding),
        shapes,
        params,
        shardings,
        transform_non_params=lambda _: replicated(mesh),
    )
    if optimizer.is_offloaded:
        state_shardings = jax.tree.map(
            lambda leaf, sharding: on_host(leaf.shape, sharding), shapes, state_shardings
        )
    dtype = optimizer.param_dtype
    shapes_of_params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)
    return Trained(
        jax.tree.map(laid_out, shapes_of_params, shardings),
        jax.tree.map(laid_out, shapes, state_shardings),
    )


def _like_parameter(
    shape: tuple[int, ...], param_shape: tuple[int, ...], sharding: NamedSharding
) -> NamedSharding:
    """The layout of an array of the optimiser: that of its parameter, without a summed axis."""
    if shape == param_shape:
        return sharding
    spec = (*sharding.spec, *(None,) * (len(param_shape) - len(sharding.spec)))
    # The last axis that fits: if two are equal, either is right and no number depends on it.
    for axis in reversed(range(len(param_shape))):
        if shape == param_shape[:axis] + param_shape[axis + 1 :]:
            return NamedSharding(sharding.mesh, PartitionSpec(*spec[:axis], *spec[axis + 1 :]))
    return replicated(sharding.mesh)  # Optax's (1,) for what an array does not have


@functools.partial(jax.jit, static_argnames="dtype")
def copied(params: Params, dtype: str) -> Params:
    """A copy that no update donates."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf).astype(dtype), params)


def abstract_copied(params: Params, dtype: str, mesh: Mesh) -> Params:
    """Shapes, dtypes and shardings of `copied`."""
    shapes = jax.eval_shape(functools.partial(copied, dtype=dtype), params)
    return jax.tree.map(laid_out, shapes, parameter_shardings(params, mesh))


def everywhere(tree: Any, mesh: Mesh) -> Any:
    """Host arrays on every device of the mesh."""
    return jax.tree.map(lambda leaf: from_host(np.asarray(leaf), replicated(mesh)), tree)


def abstract_everywhere(tree: Any, mesh: Mesh) -> Any:
    """Shapes, dtypes and shardings of `everywhere`."""
    return jax.tree.map(lambda leaf: laid_out(leaf, replicated(mesh)), tree)


def laid_out(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, and where it lies."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
