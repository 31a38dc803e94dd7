"""The optimiser: clipping, a direction by name, weight decay, rate; its copies and its place.

All models that are trained have one of `clipped`, those of a config that of `make_optimizer`.

A direction is a module with these names:

- `Options`: a frozen dataclass that checks itself. Its fields are settings of `config.optimizer`,
  or `adam_b1` and `adam_b2` of the section of the trained model.
- `direction(options) -> optax.GradientTransformation`: what becomes of the clipped gradient before
  weight decay and learning rate. It is pure and runs under `jax.jit`. Its state is made of trees
  like the parameters, and of scalars, of float32 or smaller.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import optax

from configs.default import get_config
from semrl_jax.algorithms.algorithm import read_options
from semrl_jax.models import Params
from semrl_jax.support.errors import UserError
from semrl_jax.support.modules import load_module, running
from semrl_jax.training import offload
from semrl_jax.training.optimizers import adamw

PARTS = ("Options", "direction")
OWN = ("adam_b1", "adam_b2")  # options in the section of the trained model
ALWAYS_1 = optax.constant_schedule(1.0)


@dataclasses.dataclass(frozen=True)
class Direction:
    """A module and its options; hashable, so that it can be static under `jax.jit`."""

    module: ModuleType
    options: Any


class WithMasters(NamedTuple):
    """The state of an optimiser whose parameters are rounded."""

    masters: Params  # float32, what the parameters would be without the rounding
    inner: Any  # Optax state of the masters


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An `optax.GradientTransformation`, and what becomes of the parameters and of the state."""

    init: Callable[[Params], Any]  # state of float32 parameters; see `init_trained`
    update: Callable[..., tuple[Params, Any]]  # changes of float32 parameters
    rate: optax.Schedule = ALWAYS_1  # learning rate of the update after a number of others
    # Unless it is float32, the state holds float32 masters, from which the parameters are rounded
    # after each step.
    param_dtype: str = "float32"
    # Whether the arrays of the state are in the memory of the host between steps.
    is_offloaded: bool = False

    def step(self, gradient: Params, state: Any, params: Params) -> tuple[Params, Any]:
        """Parameters and state after an update, both on the device."""
        if self.param_dtype == "float32":
            changes, state = self.update(gradient, state, params)
            return optax.apply_updates(params, changes), state
        changes, inner = self.update(gradient, state.inner, state.masters)
        masters = optax.apply_updates(state.masters, changes)
        return rounded(masters, self.param_dtype), WithMasters(masters, inner)

    def first_state(self, params: Any) -> Any:
        """The state before the first step, of float32 parameters or a placeholder of Optax."""
        state = self.init(params)
        if self.param_dtype == "float32":
            return state
        return WithMasters(jax.tree.map(jnp.copy, params), state)

    def to_device(self, state: Any) -> Any:
        """The state where `step` needs it; under `jax.jit`."""
        return offload.to_device(state) if self.is_offloaded else state

    def from_device(self, state: Any) -> Any:
        """The state where it stays between steps; under `jax.jit`."""
        return offload.to_host(state) if self.is_offloaded else state


def rounded(params: Params, dtype: str) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def clipped(
    rate: optax.Schedule,
    *,
    weight_decay: float,
    max_grad_norm: float,
    direction: Direction | None = None,
    param_dtype: str = "float32",
    is_offloaded: bool = False,
    **adamw_options: float,
) -> Optimizer:
    """Clips by global norm, then makes a step along a direction, by default AdamW's."""
    if direction is None:
        direction = Direction(adamw, adamw.Options(**adamw_options))
    transformation = optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        # The same nesting as in optax.adamw: a checkpoint has its names.
        optax.chain(
            direction.module.direction(direction.options),
            optax.add_decayed_weights(weight_decay),
            optax.scale_by_learning_rate(rate),
        ),
    )
    return Optimizer(transformation.init, transformation.update, rate, param_dtype, is_offloaded)


def schedule(
    kind: str, *, learning_rate: float, warmup_steps: int, num_steps: int, final_fraction: float
) -> optax.Schedule:
    """The learning rate of the update after a number of others.

    Args:
      kind: what follows the rise: "constant", or "linear" or "cosine" down to `final_fraction` of
        the rate, which the update after the last would have.
      learning_rate: the highest one, after a linear rise over `warmup_steps` updates.
      num_steps: of the whole training; not read for "constant".
      final_fraction: in [0, 1].
    """
    after = {  # of the share of the steps after the rise
        "constant": optax.constant_schedule(1.0),
        "linear": optax.linear_schedule(1.0, final_fraction, 1),
        "cosine": optax.cosine_decay_schedule(1.0, 1, alpha=final_fraction),
    }[kind]
    left = max(num_steps - warmup_steps, 1)

    def rate(count: Any) -> Any:
        # (count + 1): the first update already moves. A product: optax.linear_schedule subtracts
        # from the highest rate, whose rounding error is large compared with the first rates.
        risen = jnp.minimum((count + 1) / max(warmup_steps, 1), 1.0)
        return learning_rate * risen * after(jnp.clip((count - warmup_steps) / left, 0.0, 1.0))

    return rate


@functools.cache  # static under jit: equal settings give one program
def make_optimizer(
    *,
    learning_rate: float,
    learning_rate_warmup_steps: int,
    kind: str = "constant",
    num_steps: int = 0,
    final_fraction: float = 0.0,
    **settings: Any,
) -> Optimizer:
    """`clipped` with its settings, at the rate of `schedule` with the others."""
    ends = {"num_steps": num_steps, "final_fraction": final_fraction}
    warmup = {"learning_rate": learning_rate, "warmup_steps": learning_rate_warmup_steps}
    return clipped(schedule(kind, **warmup, **ends), **settings)


def num_optimizer_updates(optimizer_state: Any) -> int:
    """Updates made so far; those skipped as non-finite are none."""

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    nodes = jax.tree.leaves(optimizer_state, is_leaf=is_schedule)
    (schedule_state,) = filter(is_schedule, nodes)
    return int(schedule_state.count)


def load_direction(config: ml_collections.ConfigDict, name: str) -> Direction:
    """Loads the direction that a config names.

    `optimizer.name` is a module of `semrl_jax.training.optimizers` ("adamw") or of any package
    ("my_package.my_module"). The other fields of the section are options, and OWN of the section
    `name` of the trained model. Raises UserError if there is no such module, if a part of it is
    missing, or as `read_options`.
    """
    field, chosen = "optimizer.name", config.optimizer.name
    module = load_module(field, chosen, "semrl_jax.training.optimizers", PARTS)
    given = ((p, p.rpartition(".")[2], value) for p, value in _paths(config, name).items())
    options = read_options(field, chosen, module, given, _paths(get_config(), name))
    found = Direction(module, options)
    if not module.__name__.startswith("semrl_jax."):  # tests check the others
        with running(field, module, "direction"):
            _check(field, found)
    return found


def _paths(config: ml_collections.ConfigDict, name: str) -> dict[str, Any]:
    """Options by their full names."""
    section, own = dict(config.optimizer), config[name]
    del section["name"]
    options = dict(section.pop("options"))
    return {
        **{f"optimizer.{key}": value for key, value in section.items()},
        **{f"optimizer.options.{key}": value for key, value in options.items()},
        **{f"{name}.{key}": own[key] for key in OWN},
    }


def _check(field: str, direction: Direction) -> None:
    """Traces one step as the update does it."""
    params = {"kernel": jax.ShapeDtypeStruct((2, 256, 128), jnp.float32)}
    optimizer = clipped(ALWAYS_1, weight_decay=0.0, max_grad_norm=1.0, direction=direction)
    state = jax.eval_shape(optimizer.init, params)
    found = jax.eval_shape(optimizer.step, params, state, params)
    before, after = (
        jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)
        for tree in ((params, state), found)
    )
    if before != after:
        rule = "must keep the dtypes and shapes of the gradient and of its state"
        raise UserError(f"{field}: direction of {direction.module.__name__} {rule}.")
