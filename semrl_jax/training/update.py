"""Log-probabilities of a batch, and one optimiser step on a mini-batch; both in micro-batches.

`batch_logprobs` and `update_policy` take and return values of response tokens as [B, T] on the
devices; the layout of `packing.py` puts them into rows. `row_logprobs` and `update_rows` are the
compiled programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.algorithms import importance_weights
from semrl_jax.algorithms.algorithm import Algorithm
from semrl_jax.models import Base, Params, Policy, ValueModel, adapted, replicated
from semrl_jax.models.hosts import own_rows
from semrl_jax.programs import compiled_once, num_side_by_side, side_by_side
from semrl_jax.training.optimizer import Optimizer
from semrl_jax.training.packing import Layout, RowPlan, TokenRows, lay_out, take_values
from semrl_jax.types import RolloutBatch

# Programs side by side have a gradient each. Larger models have products that keep all cores busy.
MAX_PART_BYTES = 2**28


Options = tuple[tuple[str, Any], ...]  # static arguments of a program


class TokenPass(NamedTuple):
    """What a forward pass computes of B responses; 0 at padding.

    Attributes:
      logprobs: of each token, float32 nats, on every device of the mesh.
      entropies: of the distribution each token was drawn from, float32 nats, on every device; None
        unless asked for.
      states: [T, D] of responses, without padding, in the compute dtype, in NumPy, by their index:
        of those that lie in a data shard of this process; None unless asked for.
    """

    logprobs: Float[Array, "B T"]
    entropies: Float[Array, "B T"] | None
    states: Mapping[int, Float[np.ndarray, "_ D"]] | None


class RowPass(NamedTuple):
    """The values of `TokenPass` in rows; finite but without meaning in slots without a token.

    M micro-batches, R rows per micro-batch, U slots per row.
    """

    logprobs: Float[Array, "M R U"]
    entropies: Float[Array, "M R U"] | None
    states: Float[Array, "M R U D"] | None


class SlotValues(NamedTuple):
    """Inputs of the loss other than the policy's own values; float32, weight 0 without a token.

    Log-probabilities are None if the algorithm does not need them or the update computes them;
    those of the engine also without a correction in the update.
    """

    old_logprobs: Float[Array, "M R U"] | None
    ref_logprobs: Float[Array, "M R U"] | None
    rollout_logprobs: Float[Array, "M R U"] | None
    advantages: Float[Array, "M R U"]
    weights: Float[Array, "M R U"]


class Part(NamedTuple):
    """The micro-batches of one of several programs: `first`, `first + stride`, ...; int32."""

    first: Int[np.ndarray | Array, ""]
    stride: Int[np.ndarray | Array, ""]


class Sums(NamedTuple):
    """Sums over micro-batches: the gradient of the parameters, and scalars of the loss."""

    gradient: Params
    scalars: Mapping[str, Float[Array, ""]]


def batch_logprobs(
    params: Params,
    batch: RolloutBatch,
    *,
    policy: Policy,
    temperature: float,
    plan: RowPlan,
    with_states: bool = False,
    with_entropies: bool = False,
) -> TokenPass:
    """Log-probabilities of all responses under `params`, and whatever else is asked for.

    Args:
      params: of `policy`, on the mesh of the plan.
      batch: NumPy arrays.
    """
    layout = lay_out(batch, plan, policy.attention_columns)
    program = functools.partial(
        row_logprobs,
        policy=policy,
        temperature=temperature,
        with_states=with_states,
        with_entropies=with_entropies,
    )
    inputs = params, plan.put(layout.rows), np.int32(layout.num_micro)
    found = _sum(side_by_side(program, [(*inputs, part) for part in _parts(params, layout, plan)]))
    in_batch = functools.partial(to_batch, index=layout.slots, sharding=replicated(plan.mesh))
    return TokenPass(
        in_batch(found.logprobs),
        in_batch(found.entropies) if with_entropies else None,
        layout.responses(own_rows(found.states, plan.mesh)) if with_states else None,
    )


def update_policy(
    params: Params,
    opt_state: Any,
    batch: RolloutBatch,
    old_logprobs: Float[Array | np.ndarray, "B T"] | None,
    ref_logprobs: Float[Array | np.ndarray, "B T"] | None,
    advantages: Float[Array | np.ndarray, "B T"],
    reference: Params | None = None,
    base: Base | None = None,
    *,
    policy: Policy,
    optimizer: Optimizer,
    temperature: float,
    plan: RowPlan,
    algorithm: Algorithm,
    importance: Options = (),
) -> tuple[Params, Any, Mapping[str, Float[Array, ""] | float], Float[Array, "B T"]]:
    """One optimiser step on one mini-batch; `params` and `opt_state` are donated.

    `batch` is in NumPy; the other [B, T] arrays are on every device of the mesh, or in NumPy.

    The token weights sum to 1 over the mini-batch, so how it is laid out changes nothing but
    rounding.

    Args:
      old_logprobs: None where the algorithm needs them: those of this step's own forward pass. They
        are the same in the first optimiser step on a batch, and save a pass.
      ref_logprobs: None where the algorithm needs them: computed here, from `reference`.
      base: what `params` are adapters of, and the reference then; None: `params` are those of the
        policy.
      importance: options of `importance_weights`, of a level by token, to multiply the advantages
        by these weights here, from this step's own forward pass. Empty: they are what they are.

    Returns:
      New parameters and optimiser state, unchanged if the loss or the gradient is not finite;
      scalars, `policy/update_skipped` (0 or 1) and those of the layout among them; and the
      log-probabilities of the tokens before the step, 0 at padding.
    """
    layout = lay_out(batch, plan, policy.attention_columns)
    values = SlotValues(
        *to_slots(
            (
                old_logprobs,
                ref_logprobs,
                batch.rollout_logprobs if importance else None,
                advantages,
            ),
            batch.response_mask,
            plan.put(layout.tokens()),
            algorithm=algorithm,
            sharding=plan.sharding,
        )
    )
    inputs = plan.put(layout.rows), values, np.int32(layout.num_micro), reference, base
    options = {
        "policy": policy,
        "temperature": temperature,
        "algorithm": algorithm,
        "importance": importance,
    }
    parts = _parts(params, layout, plan)
    if len(parts) == 1:
        params, opt_state, scalars, logprobs = update_rows(
            params, opt_state, *inputs, optimizer=optimizer, **options
        )
    else:
        program = functools.partial(row_gradients, **options)
        found = side_by_side(program, [(params, *inputs, part) for part in parts])
        params, opt_state, scalars, logprobs = apply_gradients(
            params, opt_state, found, optimizer=optimizer
        )
    logprobs = to_batch(logprobs, layout.slots, sharding=replicated(plan.mesh))
    return params, opt_state, scalars | layout.scalars(), logprobs


@functools.partial(jax.jit, static_argnames="sharding")
def to_batch(
    values: Float[Array, "M R U"], index: Int[np.ndarray | Array, "B T"], *, sharding: NamedSharding
) -> Float[Array, "B T"]:
    """Values of slots at `Layout.slots`."""
    return jax.lax.with_sharding_constraint(take_values(values, index), sharding)


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
    params: Params, rows: TokenRows, model: Policy | ValueModel
) -> Float[Array, "R U D"]:
    """Final states in the compute dtype of one micro-batch: those that produced its responses."""
    states = model.final_states(params, rows.token_ids, rows.positions, rows.segment_ids)
    return model.states_at(states, rows.sources)


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
        states = response_states(params, micro, policy)
        logprobs, entropies = policy.token_logprobs(
            params, states, micro.response_ids, temperature=temperature
        )
        return RowPass(
            logprobs, entropies if with_entropies else None, states if with_states else None
        )

    return over_micro_batches(of_micro_batch, rows, num_micro, part)


@functools.partial(
    jax.jit,
    static_argnames=("policy", "optimizer", "temperature", "algorithm", "importance"),
    donate_argnames=("params", "opt_state"),
)
def update_rows(
    params: Params,
    opt_state: Any,
    rows: TokenRows,
    values: SlotValues,
    num_micro: Int[np.ndarray | Array, ""],
    reference: Params | None = None,
    base: Base | None = None,
    *,
    optimizer: Optimizer,
    **options: Any,
) -> tuple[Params, Any, Mapping[str, Float[Array, ""]], Float[Array, "M R U"]]:
    """`update_policy` in rows: gradients summed over the first `num_micro` micro-batches.

    `options` are those of `_loss_of`.
    """
    loss_of = _loss_of(reference, base, **options)
    return optimizer_step(
        params, opt_state, loss_of, (rows, values), num_micro, optimizer, prefix="policy"
    )


@compiled_once
@functools.partial(jax.jit, static_argnames=("policy", "temperature", "algorithm", "importance"))
def row_gradients(
    params: Params,
    rows: TokenRows,
    values: SlotValues,
    num_micro: Int[np.ndarray | Array, ""],
    reference: Params | None,
    base: Base | None,
    part: Part,
    **options: Any,
) -> tuple[Sums, Float[Array, "M R U"]]:
    """The sums of `update_rows` over a part, and log-probabilities, 0 in other micro-batches."""
    loss_of = _loss_of(reference, base, **options)
    return summed_gradients(params, loss_of, (rows, values), num_micro, part)


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnames=("params", "opt_state"))
def apply_gradients(
    params: Params,
    opt_state: Any,
    parts: Sequence[tuple[Sums, Float[Array, "M R U"]]],
    *,
    optimizer: Optimizer,
) -> tuple[Params, Any, Mapping[str, Float[Array, ""]], Float[Array, "M R U"]]:
    """What `update_rows` returns, from the results of `row_gradients`."""
    sums, logprobs = _sum(parts)
    return *_applied(params, opt_state, sums, optimizer, prefix="policy"), logprobs


def _loss_of(
    reference: Params | None,
    base: Base | None,
    *,
    policy: Policy,
    temperature: float,
    algorithm: Algorithm,
    importance: Options = (),
) -> Callable:
    """The loss of a micro-batch, as `summed_gradients` takes it."""
    needs = algorithm.needs
    if base is not None:
        reference = base.params

    def of_policy(params, rows):
        states = response_states(params, rows, policy)
        return policy.token_logprobs(params, states, rows.response_ids, temperature=temperature)

    def loss_of(params, micro):
        rows, values = micro
        logprobs, entropy = of_policy(adapted(params, base), rows)
        before = jax.lax.stop_gradient(logprobs)
        if needs.old_logprobs and values.old_logprobs is None:
            values = values._replace(old_logprobs=before)
        if needs.reference and values.ref_logprobs is None:
            values = values._replace(ref_logprobs=of_policy(reference, rows)[0])
        given = values._asdict()
        rollout_logprobs = given.pop("rollout_logprobs")
        if importance:  # advantages are 0 without a token, whatever the weight is there
            everywhere = jnp.ones(before.shape, bool)
            weights, _ = importance_weights(
                before, rollout_logprobs, everywhere, **dict(importance)
            )
            given["advantages"] *= weights
        ids = {"sequence_ids": rows.sequence_ids} if needs.sequence_ids else {}
        loss, scalars = algorithm.loss(logprobs, entropy, **given, **ids)
        return loss, (scalars, before)

    return loss_of


def _parts(params: Params, layout: Layout, plan: RowPlan) -> list[Part | None]:
    """The parts of the micro-batches that run side by side; [None]: one program has all."""
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    count = min(num_side_by_side(plan.mesh), layout.num_micro, MAX_PART_BYTES // num_bytes)
    if count < 2:
        return [None]
    return [Part(np.int32(first), np.int32(count)) for first in range(count)]


def _sum(trees: Sequence[Any]) -> Any:
    """The sum of trees."""
    return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), trees)


def over_micro_batches(
    function: Callable[[TokenRows], Any],
    rows: TokenRows,
    num_micro: Int[np.ndarray | Array, ""],
    part: Part | None = None,
) -> Any:
    """Results [M, ...] of a part of the first `num_micro` micro-batches; 0 in the others."""

    def write(index, outputs):
        return put(outputs, function(take(rows, index)), index)

    return _loop(num_micro, part, write, zeros_of(_stacked_shapes(function, rows)))


def _stacked_shapes(function: Callable[[Any], Any], inputs: Any) -> Any:
    """The shapes [M, ...] of what a function gives for each micro-batch.

    Without `jax.vmap`, which JAX does not have for the `ragged_dot` of experts.
    """
    count = len(jax.tree.leaves(inputs)[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype),
        jax.eval_shape(lambda inputs: function(take(inputs, 0)), inputs),
    )


def _loop(num_micro, part, step, carry):
    """Carries `step(index, carry)` over the micro-batches of a part."""
    # A bound that is traced: places left over for larger batches cost no arithmetic.
    if part is None:
        return jax.lax.fori_loop(0, num_micro, step, carry)
    first, stride = part
    num_steps = (num_micro - first + stride - 1) // stride
    return jax.lax.fori_loop(
        0, num_steps, lambda index, carry: step(first + stride * index, carry), carry
    )


def optimizer_step(
    params: Params,
    opt_state: Any,
    loss_of: Callable[[Params, Any], tuple[Float[Array, ""], tuple[Mapping[str, Array], Any]]],
    inputs: Any,
    num_micro: Int[np.ndarray | Array, ""],
    optimizer: Optimizer,
    *,
    prefix: str,
) -> tuple[Params, Any, Mapping[str, Float[Array, ""]], Any]:
    """One optimiser step on the gradient summed over the first `num_micro` micro-batches.

    Args:
      loss_of: loss of one micro-batch of `inputs`; scalars, `<prefix>/loss` among them; and a tree
        of arrays [...] to return.
      inputs: tree of [M, ...].

    Returns:
      New parameters and optimiser state, unchanged if the loss or the gradient is not finite;
      summed scalars, with `<prefix>/grad_norm` and `<prefix>/update_skipped` (0 or 1); and the
      trees as [M, ...], 0 in the other micro-batches.
    """
    sums, outputs = summed_gradients(params, loss_of, inputs, num_micro)
    return *_applied(params, opt_state, sums, optimizer, prefix), outputs


def summed_gradients(
    params: Params,
    loss_of: Callable[[Params, Any], tuple[Float[Array, ""], tuple[Mapping[str, Array], Any]]],
    inputs: Any,
    num_micro: Int[np.ndarray | Array, ""],
    part: Part | None = None,
) -> tuple[Sums, Any]:
    """Gradient and scalars summed over a part of the micro-batches; and the trees of `loss_of`."""

    def accumulate(index, carry):
        sums, outputs = carry
        (_, (scalars, own)), gradient = jax.value_and_grad(loss_of, has_aux=True)(
            params, take(inputs, index)
        )
        return jax.tree.map(jnp.add, sums, (gradient, scalars)), put(outputs, own, index)

    _, (scalars, _) = jax.eval_shape(loss_of, params, take(inputs, 0))
    _, (_, outputs) = _stacked_shapes(functools.partial(loss_of, params), inputs)
    # float32 also for rounded parameters: a sum of many small gradients would stop growing.
    zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), params)
    start = (zeros, zeros_of(scalars)), zeros_of(outputs)
    sums, outputs = _loop(num_micro, part, accumulate, start)
    return Sums(*sums), outputs


def _applied(
    params: Params,
    opt_state: Any,
    sums: Sums,
    optimizer: Optimizer,
    prefix: str,
) -> tuple[Params, Any, Mapping[str, Float[Array, ""]]]:
    """One step on the summed gradient, as `optimizer_step` describes it."""
    gradient, scalars = sums
    grad_norm = optax.global_norm(gradient)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(scalars[f"{prefix}/loss"])
    opt_state = optimizer.to_device(opt_state)
    new_params, new_opt_state = optimizer.step(gradient, opt_state, params)
    keep = functools.partial(jnp.where, finite)
    return (
        jax.tree.map(keep, new_params, params),
        optimizer.from_device(jax.tree.map(keep, new_opt_state, opt_state)),
        scalars
        | {
            f"{prefix}/grad_norm": grad_norm,
            f"{prefix}/update_skipped": 1.0 - finite.astype(jnp.float32),
        },
    )


def take(tree: Any, index: int | Int[Array, ""]) -> Any:
    """Micro-batch `index` of leaves [M, ...]."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree
    )


def put(tree: Any, parts: Any, index: int | Int[Array, ""]) -> Any:
    """Leaves [M, ...] with `parts` as their micro-batch `index`."""
    return jax.tree.map(
        lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, index, 0), tree, parts
    )


def zeros_of(shapes: Any) -> Any:
    """Zeros of the shapes and dtypes of a tree."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def split_rows(tree: Any, micro_batch_size: int) -> Any:
    """[B, ...] leaves to [M, b, ...]; micro-batch m holds rows m, m + M, ...

    Rows sharded over the data axes stay where they are.
    """

    def split(leaf):
        num_micro = leaf.shape[0] // micro_batch_size
        assert num_micro * micro_batch_size == leaf.shape[0], "validated with the config"
        return leaf.reshape(micro_batch_size, num_micro, *leaf.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, tree)
