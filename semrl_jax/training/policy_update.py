"""The policy: log-probabilities of a batch, and the loss of its update; both in micro-batches.

`batch_logprobs` and `PolicyLoss` take and return values of response tokens as [B, T] on the
devices; the layout of `packing.py` puts them into rows. `row_logprobs` and `trainee.update_rows`
are the compiled programs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.algorithms import importance_weights
from semrl_jax.algorithms.algorithm import Algorithm
from semrl_jax.algorithms.credit import Options
from semrl_jax.models import Params, Policy, ValueModel, adapted, replicated
from semrl_jax.models.hosts import own_rows
from semrl_jax.models.lora import Dropout
from semrl_jax.support.programs import Part, compiled_once, parts_of, side_by_side, total
from semrl_jax.training.micro_batches import over_micro_batches
from semrl_jax.training.packing import RowPlan, TokenRows, lay_out, take_values, to_batch
from semrl_jax.training.trainee import Frozen, Inputs, MiniBatch
from semrl_jax.types import RolloutBatch

MAX_STATE_BYTES = 2**30  # of hidden states that a program leaves on a device


class TokenPass(NamedTuple):
    """What a forward pass computes of B responses; 0 at padding, None unless asked for."""

    logprobs: Float[Array, "B T"]  # of each token, float32 nats, on every device of the mesh
    # The entropy of the distribution each token was drawn from, float32 nats, on every device.
    entropies: Float[Array, "B T"] | None
    # [T, D] of responses, without padding, in the compute dtype, in NumPy, by their index: of those
    # that lie in a data shard of this process.
    states: Mapping[int, Float[np.ndarray, "_ D"]] | None


class RowPass(NamedTuple):
    """The values of `TokenPass` in rows; finite but without meaning in slots without a token.

    M micro-batches, R rows per micro-batch, U slots per row.
    """

    logprobs: Float[Array, "*M R U"]
    entropies: Float[Array, "*M R U"] | None
    states: Float[Array, "*M R U D"] | None
    divergences: Float[Array, "*M R U"] | None = None  # from the reference


class SlotValues(NamedTuple):
    """Inputs of the loss other than the policy's own values; float32, weight 0 without a token.

    Log-probabilities are None if the algorithm does not need them or the update computes them.
    `rollout_logprobs`, from the engine, is also None without a correction in the update. `given` is
    1 on tokens of given responses, and None in a run without such.
    """

    old_logprobs: Float[Array, "M R U"] | None
    ref_logprobs: Float[Array, "M R U"] | None
    rollout_logprobs: Float[Array, "M R U"] | None
    advantages: Float[Array, "M R U"]
    weights: Float[Array, "M R U"]
    given: Float[Array, "M R U"] | None = None


def batch_logprobs(
    params: Params,
    batch: RolloutBatch,
    *,
    policy: Policy,
    temperature: float,
    plan: RowPlan,
    with_states: bool = False,
    with_entropies: bool = False,
    replays: bool = False,
) -> TokenPass:
    """Log-probabilities of all responses under `params`; states and entropies if asked for.

    `replays`: see `lay_out`.
    """
    layout = lay_out(batch, plan, policy.attention_columns, replays=replays)
    program = functools.partial(
        row_logprobs,
        policy=policy,
        temperature=temperature,
        with_states=with_states,
        with_entropies=with_entropies,
    )
    size, num_rows, num_slots = layout.rows.sources.shape  # micro-batches of a program: all
    if with_states:
        width = policy.config.hidden_size * jnp.dtype(policy.compute_dtype).itemsize
        most = MAX_STATE_BYTES // (num_rows // plan.num_shards * num_slots * width)
        size = min(size, max(most, 1))

    def passed(first: int) -> RowPass:
        num_micro, places = min(layout.num_micro - first, size), range(first, first + size)
        rows = jax.tree.map(lambda leaf: np.take(leaf, places, axis=0, mode="clip"), layout.rows)
        inputs = params, plan.put(rows), np.int32(num_micro)
        parts = parts_of(num_micro, params, plan.mesh)
        found = total(side_by_side(program, [(*inputs, part) for part in parts]))
        return found._replace(states=own_rows(found.states, plan.mesh)) if with_states else found

    found = [passed(first) for first in range(0, layout.num_micro, size)]

    def in_batch(values: list[Float[Array, "M R U"]]) -> Float[Array, "B T"]:
        values = jnp.concatenate(values) if len(values) > 1 else values[0]
        return to_batch(values, layout.slots, sharding=replicated(plan.mesh))

    shards = {
        shard: [micro for each in found for micro in each.states[shard]]
        for shard in (found[0].states if with_states else ())
    }
    return TokenPass(
        in_batch([each.logprobs for each in found]),
        in_batch([each.entropies for each in found]) if with_entropies else None,
        layout.responses(shards) if with_states else None,
    )


@functools.partial(jax.jit, static_argnames=("algorithm", "sharding"))
def to_slots(
    arrays: tuple[Float[Array | np.ndarray, "B T"] | None, ...],
    mask: Bool[Array | np.ndarray, "B T"],
    index: Int[Array, "M R U"],
    *,
    algorithm: Algorithm,
    sharding: NamedSharding,
) -> tuple[Float[Array, "M R U"] | None, ...]:
    """The arrays at `Layout.tokens`, and the token weights of the mini-batch after them."""
    arrays = (*arrays, algorithm.token_weights(mask))
    slots = jax.tree.map(lambda values: take_values(values, index), arrays)
    return jax.lax.with_sharding_constraint(slots, sharding)


def response_states(
    params: Params, rows: TokenRows, model: Policy | ValueModel, dropout: float = 0.0
) -> Float[Array, "R U D"]:
    """Final states in the compute dtype of one micro-batch: those that produced its responses."""
    masks = Dropout(dropout, *rows.dropout) if dropout and rows.dropout else None
    inputs = rows.token_ids, rows.positions, rows.segment_ids, masks, rows.experts
    states = model.final_states(params, *inputs)
    return model.states_at(states, rows.sources)


def _response_pass(
    params: Params,
    rows: TokenRows,
    policy: Policy,
    temperature: float,
    reference: tuple[Policy, Params] | None = None,
    dropout: float = 0.0,
) -> RowPass:
    """All values of one micro-batch; with a reference, the KL from it, over the vocabulary."""
    states, other = response_states(params, rows, policy, dropout), None
    if reference is not None:
        other = *reference, response_states(reference[1], _unrouted(rows), reference[0])
    logprobs, entropies, *divergences = policy.token_logprobs(
        params, states, rows.response_ids, temperature=temperature, other=other
    )
    return RowPass(logprobs, entropies, states, *divergences)


def _unrouted(rows: TokenRows) -> TokenRows:
    """The rows for another model: its routers choose."""
    return rows._replace(experts=None)


@compiled_once
@functools.partial(
    jax.jit, static_argnames=("policy", "temperature", "with_states", "with_entropies")
)
def row_logprobs(
    params: Params,
    rows: TokenRows,
    num_micro: Int[np.ndarray | Array, ""],
    part: Part | None = None,
    *,
    policy: Policy,
    temperature: float,
    with_states: bool = False,
    with_entropies: bool = False,
) -> RowPass:
    """`batch_logprobs` of a part of the first `num_micro` micro-batches; 0 in the others."""

    def of_micro_batch(micro: TokenRows) -> RowPass:
        found = _response_pass(params, micro, policy, temperature)
        found = found if with_states else found._replace(states=None)
        return found if with_entropies else found._replace(entropies=None)

    return over_micro_batches(of_micro_batch, rows, num_micro, part)


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """The loss of an algorithm; see `trainee.Loss`. It returns log-probabilities before the step.

    Log-probabilities that the algorithm needs and the mini-batch lacks come from the update's own
    forward pass. The old ones are the same in the first optimiser step on a batch, which saves a
    pass.
    """

    model: Policy
    temperature: float
    algorithm: Algorithm
    # Options of `importance_weights`, of a level by token, to multiply the advantages by these
    # weights here, from this step's own forward pass. Empty: they are what they are.
    importance: Options = ()
    reference: Policy | None = None  # architecture of the reference; None: the policy's
    dropout: float = 0.0  # of the inputs of adapters, in the policy's pass alone

    def inputs(self, batch: MiniBatch, plan: RowPlan) -> Inputs:
        rows = batch.rows
        dropout = batch.dropout if self.dropout else None
        columns = self.model.attention_columns
        if self.reference is not None and not self.reference.attention_columns:
            columns = 0.0  # it reads the same rows, and its kernel knows no shared prompt
        layout = lay_out(rows, plan, columns, dropout, replays=True)
        rollout_logprobs = rows.rollout_logprobs if self.importance else None
        given = None
        if rows.given is not None:
            given = (rows.response_mask & rows.given[:, None]).astype(np.float32)
        *values, given, weights = to_slots(
            (batch.old_logprobs, batch.ref_logprobs, rollout_logprobs, batch.advantages, given),
            rows.response_mask,
            plan.put(layout.tokens()),
            algorithm=self.algorithm,
            sharding=plan.sharding,
        )
        arrays = plan.put(layout.rows), SlotValues(*values, weights, given)
        return Inputs(arrays, layout.num_micro, layout.scalars(), layout.slots)

    def __call__(
        self, params: Params, frozen: Frozen, micro: tuple[TokenRows, SlotValues]
    ) -> tuple[Float[Array, ""], tuple[dict[str, Float[Array, ""]], Float[Array, "R U"]]]:
        needs, (rows, values) = self.algorithm.needs, micro
        of_responses = functools.partial(_response_pass, temperature=self.temperature)
        reference = None
        if needs.reference and values.ref_logprobs is None:
            own = frozen.base.params if frozen.reference is None else frozen.reference
            reference = self.reference or self.model, own
        found = of_responses(
            adapted(params, frozen.base),
            rows,
            self.model,
            reference=reference if needs.exact_kl else None,
            dropout=self.dropout,
        )
        logprobs, entropy = found.logprobs, found.entropies
        before = jax.lax.stop_gradient(logprobs)
        if needs.old_logprobs and values.old_logprobs is None:
            values = values._replace(old_logprobs=before)
        if reference is not None and not needs.exact_kl:
            policy, params = reference
            of_reference = of_responses(params, _unrouted(rows), policy)
            values = values._replace(ref_logprobs=of_reference.logprobs)
        arrays = values._asdict()
        rollout_logprobs, given = arrays.pop("rollout_logprobs"), arrays.pop("given")
        if given is not None:
            given = given > 0
        if self.importance:  # padding has advantage 0, so its weight has no effect
            sampled = jnp.ones(before.shape, bool) if given is None else ~given
            weights, _ = importance_weights(
                before, rollout_logprobs, sampled, **dict(self.importance)
            )
            arrays["advantages"] *= weights
        if needs.sequence_ids:
            arrays["sequence_ids"] = rows.sequence_ids
        if needs.exact_kl:
            arrays["kl"] = found.divergences
        if needs.given:
            arrays["given"] = given
        loss, scalars = self.algorithm.loss(logprobs, entropy, **arrays)
        return loss, (scalars, before)
