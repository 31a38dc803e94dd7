"""The critic: values of a batch, and the loss of its update; rows as in `policy_update.py`."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from semrl_jax.algorithms.algorithm import Algorithm
from semrl_jax.models import Params, ValueModel, adapted, replicated
from semrl_jax.training.micro_batches import over_micro_batches
from semrl_jax.training.packing import RowPlan, TokenRows, lay_out, to_batch
from semrl_jax.training.policy_update import response_states, to_slots
from semrl_jax.training.trainee import Frozen, Inputs, MiniBatch
from semrl_jax.types import RolloutBatch


class ValueTargets(NamedTuple):
    """Inputs of the critic's loss other than its values; float32, weight 0 without a token."""

    old_values: Float[Array, "M R U"]
    returns: Float[Array, "M R U"]
    weights: Float[Array, "M R U"]


def batch_values(
    params: Params, batch: RolloutBatch, *, model: ValueModel, plan: RowPlan
) -> Float[Array, "B T"]:
    """The value before each response token, float32 on every device; 0 at padding."""
    layout = lay_out(batch, plan, model.decoder.attention_columns)
    found = row_values(params, plan.put(layout.rows), np.int32(layout.num_micro), model=model)
    return to_batch(found, layout.slots, sharding=replicated(plan.mesh))


@functools.partial(jax.jit, static_argnames="model")
def row_values(
    params: Params, rows: TokenRows, num_micro: Int[np.ndarray | Array, ""], *, model: ValueModel
) -> Float[Array, "M R U"]:
    """`batch_values` of the first `num_micro` micro-batches; 0 in the others."""

    def of_micro_batch(micro: TokenRows) -> Float[Array, "R U"]:
        return model.values(params, response_states(params, micro, model))

    return over_micro_batches(of_micro_batch, rows, num_micro)


@dataclasses.dataclass(frozen=True)
class CriticLoss:
    """The value loss of an algorithm; see `trainee.Loss`. It returns nothing."""

    model: ValueModel
    algorithm: Algorithm
    dropout: float = 0.0  # of the inputs of adapters

    def inputs(self, batch: MiniBatch, plan: RowPlan) -> Inputs:
        # Other masks than the policy's.
        dropout = batch.dropout ^ 1 if self.dropout and batch.dropout is not None else None
        layout = lay_out(batch.rows, plan, self.model.decoder.attention_columns, dropout)
        targets = to_slots(
            (batch.values, batch.returns),
            batch.rows.response_mask,
            plan.put(layout.tokens()),
            algorithm=self.algorithm,
            sharding=plan.sharding,
        )
        arrays = plan.put(layout.rows), ValueTargets(*targets)
        return Inputs(arrays, layout.num_micro)

    def __call__(
        self, params: Params, frozen: Frozen, micro: tuple[TokenRows, ValueTargets]
    ) -> tuple[Float[Array, ""], tuple[dict[str, Float[Array, ""]], tuple[()]]]:
        rows, targets = micro
        whole = adapted(params, frozen.base)
        states = response_states(whole, rows, self.model, self.dropout)
        values = self.model.values(whole, states)
        loss, scalars = self.algorithm.value_loss(values, **targets._asdict())
        return loss, (scalars, ())
