"""The warm start: a random model learns generated demonstrations. Conversations: `fine_tuning`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from semrl_jax.data import Demonstrations
from semrl_jax.models import AXES, Params, Policy, make_mesh
from semrl_jax.support.errors import UserError
from semrl_jax.training.micro_batches import split_rows
from semrl_jax.training.optimizer import clipped
from semrl_jax.training.packing import RowPlan
from semrl_jax.training.train_state import POLICY, Trained
from semrl_jax.training.trainee import Frozen, Inputs, Trainee

OPTIMIZER = {"weight_decay": 0.01, "max_grad_norm": 1.0, "adam_b2": 0.98}
WARMUP_STEPS = 20
FINAL_RATE = 0.05
DEMONSTRATION_ORDER = 0xDE30  # last in its seed: apart from every stream of two numbers


@dataclasses.dataclass(frozen=True)
class DemonstrationLoss:
    """The mean negative log-probability of the tokens to learn, in nats; see `trainee.Loss`.

    Rows are taken as they are, of one width.
    """

    model: Policy

    def inputs(self, batch: Demonstrations, plan: RowPlan) -> Inputs:
        num_tokens = np.float32(np.count_nonzero(batch.loss_mask))
        weights = batch.loss_mask / num_tokens
        arrays = batch.token_ids, batch.segment_ids, batch.positions, weights
        arrays = split_rows(arrays, plan.micro_batch_size)
        return Inputs(arrays, len(weights) // plan.micro_batch_size)

    def __call__(
        self, params: Params, frozen: Frozen, micro: tuple[Array, ...]
    ) -> tuple[Float[Array, ""], tuple[dict[str, Float[Array, ""]], tuple[()]]]:
        token_ids, segment_ids, positions, weights = micro
        states = self.model.final_states(params, token_ids, positions, segment_ids)
        logprobs, _ = self.model.token_logprobs(params, states[:, :-1], token_ids[:, 1:])
        weights = weights[:, 1:]
        loss = -jnp.sum(jnp.where(weights > 0, logprobs * weights, 0.0))
        return loss, ({f"{POLICY}/loss": jax.lax.stop_gradient(loss)}, ())


def schedule(learning_rate: float, num_steps: int) -> optax.Schedule:
    """The rate rises for 20 steps, is constant to the half, then falls linearly to 5 %."""
    last, half = FINAL_RATE * learning_rate, num_steps // 2
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, learning_rate, WARMUP_STEPS),
            optax.linear_schedule(learning_rate, last, num_steps - half),
        ],
        [max(half, WARMUP_STEPS)],
    )


def fit_demonstrations(
    policy: Policy,
    params: Params,
    demonstrations: Demonstrations,
    *,
    num_steps: int,
    batch_size: int,
    micro_batch_size: int,
    learning_rate: float,
    seed: int,
    report: Callable[[int, float], None],
) -> Params:
    """Trains a policy on one device with AdamW; returns the trained parameters.

    Args:
      params: float32 parameters to start from; donated.
      demonstrations: N rows of S columns; the tokens of `loss_mask` are learned.
      micro_batch_size: divides `batch_size`.
      seed: of the order of demonstrations.
      report: called with (step, loss in nats a token) after every step.

    Raises UserError if a loss or gradient is not finite.
    """
    optimizer = clipped(schedule(learning_rate, num_steps), **OPTIMIZER)
    trainee = Trainee(POLICY, optimizer, DemonstrationLoss(policy))
    trained = Trained(params, optimizer.first_state(params))
    mesh = make_mesh(dict.fromkeys(AXES, 1), jax.local_devices()[:1])
    plan = RowPlan(mesh, micro_batch_size)
    random = np.random.default_rng((seed, 0, DEMONSTRATION_ORDER))
    num_rows = len(demonstrations.token_ids)
    order = np.concatenate(
        [random.permutation(num_rows) for _ in range(-(-num_steps * batch_size // num_rows))]
    )
    for step in range(num_steps):
        rows = order[step * batch_size : (step + 1) * batch_size]
        columns = {name: column[rows] for name, column in vars(demonstrations).items()}
        trained, scalars, _ = trainee.update(trained, Demonstrations(**columns), plan)
        if scalars[f"{POLICY}/update_skipped"]:
            raise UserError(
                f"warm_start.learning_rate={learning_rate}: the loss or gradient of step {step} is "
                "not finite; lower it."
            )
        report(step, float(scalars[f"{POLICY}/loss"]))
    return trained.params
