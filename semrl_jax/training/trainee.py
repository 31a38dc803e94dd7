"""A trained model: what it minimises, with which optimiser, and one optimiser step on a mini-batch.

The policy and the critic of a run, the policy of a supervised fine-tuning and that of a warm start
are trainees. `TrainState` has their arrays. A third model of a run follows the critic: in
`Learner`, `MiniBatch`, `PassPlan` and `Passes`, in the settings and their checks, and in setup.py,
memory.py and dry_run.py of `runs`. Its scalars begin with its name (`RESERVED` of algorithm.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from semrl_jax.models import Base, Params, array_sums, replicated
from semrl_jax.support.programs import compiled_once, parts_of, side_by_side, total
from semrl_jax.training.micro_batches import Sums, summed_gradients
from semrl_jax.training.optimizer import Optimizer, num_optimizer_updates
from semrl_jax.training.packing import RowPlan, to_batch
from semrl_jax.training.train_state import Trained, TrainState, everywhere
from semrl_jax.types import RolloutBatch

DROPOUT = 0xD0D0  # last in its seed: apart from every stream of fewer numbers


class MiniBatch(NamedTuple):
    """B responses to learn from; [B, T] on every device or in NumPy, None where nothing needs it.

    The tokens of `rows` are in NumPy, one response per row. The loss lays them out in the packed
    rows of `packing.TokenRows`.
    """

    rows: RolloutBatch
    # From the passes before the update.
    old_logprobs: Float[Array | np.ndarray, "B T"] | None = None
    ref_logprobs: Float[Array | np.ndarray, "B T"] | None = None
    values: Float[Array | np.ndarray, "B T"] | None = None
    advantages: Float[Array | np.ndarray, "B T"] | None = None  # of the tokens, for a policy
    returns: Float[Array | np.ndarray, "B T"] | None = None  # what a critic learns
    dropout: int | None = None  # the number of the update, see `update_number`

    def named(self) -> dict[str, np.ndarray]:
        """The arrays on the host by name, such as token_ids and advantages."""
        fields = self._asdict()
        fields = fields.pop("rows")._asdict() | fields
        return {name: np.asarray(field) for name, field in fields.items() if field is not None}


def update_number(*numbers: int) -> int:
    """A random number below 2^31 from the seed of the run, the step and the mini-batch."""
    return int(np.random.SeedSequence((*numbers, DROPOUT)).generate_state(1)[0] >> 1)


class Inputs(NamedTuple):
    """A mini-batch in micro-batches."""

    arrays: Any  # tree of [M, ...], what the loss takes
    # Micro-batches that hold tokens. They come first of the M; the others are skipped.
    num_micro: int
    layout: Mapping[str, float] = {}  # scalars of how the mini-batch is laid out, for the log
    # Where `to_batch` finds the tokens of the batch in what the loss returns; None: there are none.
    slots: Int[np.ndarray, "B T"] | None = None


class Frozen(NamedTuple):
    """Parameters that a loss reads and no update changes."""

    # With LoRA, the parameters below the adapters. The policy's are the reference too.
    base: Base | None = None
    # Without LoRA, for reference log-probabilities that the update computes itself.
    reference: Params | None = None


NOTHING_FROZEN = Frozen()


@runtime_checkable
class Loss(Protocol):
    """What a trainee minimises; hashable, as it is static. The learner's losses have a `model`."""

    def inputs(self, batch: Any, plan: RowPlan) -> Inputs:
        """A mini-batch as its loss takes it, on the devices of the plan."""

    def __call__(
        self, params: Params, frozen: Frozen, micro: Any
    ) -> tuple[Float[Array, ""], tuple[dict[str, Float[Array, ""]], Any]]:
        """The share of one micro-batch in the loss of its mini-batch.

        Also returns scalars to be summed like it, `<name of the trainee>/loss` among them; and an
        array of values of the slots, or ().
        """


@dataclasses.dataclass(frozen=True)
class Trainee:
    """A model that updates train."""

    name: str  # of its field in `TrainState` (the policy has two), and the prefix of its scalars
    optimizer: Optimizer  # with the schedule of its learning rate
    loss: Loss  # what it minimises
    frozen: Frozen = NOTHING_FROZEN  # on the mesh of the trained parameters
    first_step: int = 0  # of the training loop; in earlier steps the model is left unchanged
    # Whether several programs may share the micro-batches on a CPU, see `programs.py`. Their
    # gradients are summed in another order, which changes numbers within rounding.
    in_parts: bool = True

    def learning_rate(self, trained: Trained) -> float:
        """The rate of the next update; skipped updates do not count."""
        return float(self.optimizer.rate(num_optimizer_updates(trained.optimizer)))

    def update(
        self, trained: Trained, batch: Any, plan: RowPlan
    ) -> tuple[Trained, Mapping[str, Float[Array, ""] | float], Float[Array, "B T"] | None]:
        """One optimiser step on a `MiniBatch`, or what the loss takes; `trained` is donated.

        The token weights sum to 1 over the mini-batch, so how it is laid out changes nothing but
        rounding. Returns the model, unchanged if the loss or the gradient is not finite; scalars,
        among them `grad_norm` and `update_skipped` (0 or 1) under the prefix and the layout's
        scalars; and what the loss returns of the tokens, 0 at padding.
        """
        inputs = self.loss.inputs(batch, plan)
        arguments = inputs.arrays, np.int32(inputs.num_micro), self.frozen
        apply = {"optimizer": self.optimizer, "prefix": self.name}
        parts = parts_of(inputs.num_micro, trained.params, plan.mesh) if self.in_parts else []
        if len(parts) < 2:
            found = update_rows(*trained, *arguments, loss=self.loss, **apply)
        else:
            program = functools.partial(row_gradients, loss=self.loss)
            sums = side_by_side(program, [(trained.params, *arguments, part) for part in parts])
            found = apply_gradients(*trained, sums, **apply)
        params, opt_state, scalars, outputs = found
        tokens, slots = None, inputs.slots
        if slots is not None:
            tokens = to_batch(outputs, slots, sharding=replicated(plan.mesh))
        return Trained(params, opt_state), scalars | inputs.layout, tokens

    def gradient_sums(self, params: Params, batch: Any, plan: RowPlan) -> Any:
        """`array_sums` of the gradient that `update` would take its step with."""
        inputs = self.loss.inputs(batch, plan)
        arguments = params, inputs.arrays, np.int32(inputs.num_micro), self.frozen
        return gradient_sums(*arguments, loss=self.loss)


class NonFiniteUpdates(RuntimeError):
    """Too many updates in a row were not finite, the last one of `models` on `minibatch`."""

    def __init__(self, num_updates: int, minibatch: MiniBatch, models: Sequence[str]):
        super().__init__(f"the loss or gradient of {num_updates} updates in a row was not finite")
        self.minibatch, self.models = minibatch, tuple(models)


def update_all(
    trainees: Sequence[Trainee],
    state: TrainState,
    batch: MiniBatch,
    plan: RowPlan,
    max_skipped: int,
) -> tuple[TrainState, dict[str, float], dict[str, Float[Array, "B T"] | None]]:
    """One optimiser step of each trainee on one mini-batch; its arrays in `state` are donated.

    Returns the state, with the same `step`; scalars; and what the losses return, by trainee.
    NonFiniteUpdates: after `max_skipped` non-finite updates in a row.
    """
    scalars: dict[str, Any] = {}
    outputs = {}
    for trainee in trainees:
        name = trainee.name
        trained, found, outputs[name] = trainee.update(state.trained(name), batch, plan)
        state, scalars = state.with_trained(name, trained), scalars | dict(found)
    jax.block_until_ready(state)
    scalars = {name: float(value) for name, value in scalars.items()}
    of = [each.name for each in trainees if scalars[f"{each.name}/update_skipped"]]
    skipped = int(state.skipped_in_row) + 1 if of else 0
    if skipped >= max_skipped:
        raise NonFiniteUpdates(skipped, batch, of)
    state = state._replace(skipped_in_row=everywhere(np.int32(skipped), plan.mesh))
    return state, scalars, outputs


@functools.partial(
    jax.jit, static_argnames=("loss", "optimizer", "prefix"),
    donate_argnames=("params", "opt_state"),
)  # fmt: skip
def update_rows(
    params: Params,
    opt_state: Any,
    inputs: Any,
    num_micro: Int[np.ndarray | Array, ""],
    frozen: Frozen = NOTHING_FROZEN,
    *,
    loss: Loss,
    optimizer: Optimizer,
    prefix: str,
) -> tuple[Params, Any, Mapping[str, Float[Array, ""]], Any]:
    """`Trainee.update` in rows: gradients summed over the first `num_micro` micro-batches."""
    sums, outputs = _gradients(params, inputs, num_micro, frozen, loss=loss)
    return *_applied(params, opt_state, sums, optimizer, prefix), outputs


def _gradients(params, inputs, num_micro, frozen, part=None, *, loss) -> tuple[Sums, Any]:
    """The sums of `update_rows` over a part, and what the loss returns, 0 in the other parts."""
    return summed_gradients(
        params, lambda params, micro: loss(params, frozen, micro), inputs, num_micro, part
    )


@functools.partial(jax.jit, static_argnames="loss")
def gradient_sums(params, inputs, num_micro, frozen, *, loss) -> Any:
    """`array_sums` of the gradient over the first `num_micro` micro-batches."""
    sums, _ = _gradients(params, inputs, num_micro, frozen, loss=loss)
    return array_sums(sums.gradient)


row_gradients = compiled_once(jax.jit(_gradients, static_argnames="loss"))


@functools.partial(
    jax.jit, static_argnames=("optimizer", "prefix"), donate_argnames=("params", "opt_state")
)
def apply_gradients(
    params: Params,
    opt_state: Any,
    parts: Sequence[tuple[Sums, Any]],
    *,
    optimizer: Optimizer,
    prefix: str,
) -> tuple[Params, Any, Mapping[str, Float[Array, ""]], Any]:
    """What `update_rows` returns, from the results of `row_gradients`."""
    sums, outputs = total(parts)
    return *_applied(params, opt_state, sums, optimizer, prefix), outputs


def _applied(
    params: Params, opt_state: Any, sums: Sums, optimizer: Optimizer, prefix: str
) -> tuple[Params, Any, Mapping[str, Float[Array, ""]]]:
    """One step on the summed gradient; nothing changes if it or the loss is not finite."""
    gradient, scalars = sums
    grad_norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(scalars[f"{prefix}/loss"])
    opt_state = optimizer.to_device(opt_state)
    new_params, new_opt_state = optimizer.step(gradient, opt_state, params)
    keep = functools.partial(jnp.where, finite)
    scalars = dict(scalars) | {
        f"{prefix}/grad_norm": grad_norm,
        f"{prefix}/update_skipped": 1.0 - finite.astype(jnp.float32),
    }
    params = jax.tree.map(keep, new_params, params)
    return params, optimizer.from_device(jax.tree.map(keep, new_opt_state, opt_state)), scalars
