"""The critic: values of a batch, and one optimiser step on a mini-batch; rows as in `update.py`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from semrl_jax.algorithms.algorithm import Algorithm
from semrl_jax.models import Base, Params, ValueModel, adapted, replicated
from semrl_jax.training.optimizer import Optimizer
from semrl_jax.training.packing import RowPlan, TokenRows, lay_out
from semrl_jax.training.state import Trained
from semrl_jax.training.update import (
    optimizer_step,
    over_micro_batches,
    response_states,
    to_batch,
    to_slots,
)
from semrl_jax.types import RolloutBatch


class ValueTargets(NamedTuple):
    """Inputs of the critic's loss other than its values; float32, weight 0 without a token."""

    old_values: Float[Array, "M R U"]
    returns: Float[Array, "M R U"]
    weights: Float[Array, "M R U"]


def batch_values(
    params: Params, batch: RolloutBatch, *, model: ValueModel, plan: RowPlan
) -> Float[Array, "B T"]:
    """The value before each response token, float32 on every device; 0 at padding.

    Args:
      params: of `model`, on the mesh of the plan.
      batch: NumPy arrays.
    """
    layout = lay_out(batch, plan, model.decoder.attention_columns)
    found = row_values(params, plan.put(layout.rows), np.int32(layout.num_micro), model=model)
    return to_batch(found, layout.slots, sharding=replicated(plan.mesh))


def update_critic(
    critic: Trained,
    batch: RolloutBatch,
    old_values: Float[Array | np.ndarray, "B T"],
    returns: Float[Array | np.ndarray, "B T"],
    *,
    model: ValueModel,
    optimizer: Optimizer,
    base: Base | None = None,
    plan: RowPlan,
    algorithm: Algorithm,
) -> tuple[Trained, Mapping[str, Float[Array, ""]]]:
    """One optimiser step on one mini-batch, as `update_policy`; `critic` is donated.

    Returns:
      The critic, unchanged if its loss or gradient is not finite; and scalars,
      `critic/update_skipped` (0 or 1) among them.
    """
    layout = lay_out(batch, plan, model.decoder.attention_columns)
    targets = ValueTargets(
        *to_slots(
            (old_values, returns),
            batch.response_mask,
            plan.put(layout.tokens()),
            algorithm=algorithm,
            sharding=plan.sharding,
        )
    )
    params, opt_state, scalars = update_value_rows(
        *critic,
        plan.put(layout.rows),
        targets,
        np.int32(layout.num_micro),
        base,
        model=model,
        optimizer=optimizer,
        algorithm=algorithm,
    )
    return Trained(params, opt_state), scalars


@functools.partial(jax.jit, static_argnames="model")
def row_values(
    params: Params, rows: TokenRows, num_micro: Int[np.ndarray | Array, ""], *, model: ValueModel
) -> Float[Array, "M R U"]:
    """`batch_values` of the first `num_micro` micro-batches; 0 in the others."""

    def of_micro_batch(micro: TokenRows) -> Float[Array, "R U"]:
        return model.values(params, response_states(params, micro, model))

    return over_micro_batches(of_micro_batch, rows, num_micro)


@functools.partial(
    jax.jit,
    static_argnames=("model", "optimizer", "algorithm"),
    donate_argnames=("params", "opt_state"),
)
def update_value_rows(
    params: Params,
    opt_state: Any,
    rows: TokenRows,
    targets: ValueTargets,
    num_micro: Int[np.ndarray | Array, ""],
    base: Base | None = None,
    *,
    model: ValueModel,
    optimizer: Optimizer,
    algorithm: Algorithm,
) -> tuple[Params, Any, Mapping[str, Float[Array, ""]]]:
    """`update_critic` in rows: gradients summed over the first `num_micro` micro-batches."""

    def loss_of(params, micro):
        micro_rows, micro_targets = micro
        whole = adapted(params, base)
        values = model.values(whole, response_states(whole, micro_rows, model))
        loss, scalars = algorithm.value_loss(values, **micro_targets._asdict())
        return loss, (scalars, ())

    *updated, _ = optimizer_step(
        params, opt_state, loss_of, (rows, targets), num_micro, optimizer, prefix="critic"
    )
    return tuple(updated)
