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

from semrl_jax.algorithms.algorithm import Algorithm
from semrl_jax.cores import side_by_side, usable_cores
from semrl_jax.models import Params, Policy, ValueModel, replicated
from semrl_jax.models.hosts import own_rows
from semrl_jax.training.packing import Layout, RowPlan, TokenRows, lay_out, take_values
from semrl_jax.types import RolloutBatch


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

    Log-probabilities are None if the algorithm does not need them or the update computes them.
    """

    old_logprobs: Float[Array, "M R U"] | None
    ref_logprobs: Float[Array, "M R U"] | None
    advantages: Float[Array, "M R U"]
    weights: Float[Array, "M R U"]


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
    layout = lay_out(batch, plan)
    options = {"with_states": with_states, "with_entropies": with_entropies}
    program = _bound(row_logprobs, policy=policy, temperature=temperature, **options)
    parts = [(params, plan.put(rows), count) for rows, _, count in _parts(layout, plan)]
    found = _joined(side_by_side(program, parts))
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
    *,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    temperature: float,
    plan: RowPlan,
    algorithm: Algorithm,
) -> tuple[Params, Any, Mapping[str, Float[Array, ""] | float], Float[Array, "B T"]]:
    """One optimiser step on one mini-batch; `params` and `opt_state` are donated.

    `batch` is in NumPy; the other [B, T] arrays are on every device of the mesh, or in NumPy.

    The token weights sum to 1 over the mini-batch, so how it is laid out changes nothing but
    rounding.

    Args:
      old_logprobs: None where the algorithm needs them: those of this step's own forward pass. They
        are the same in the first optimiser step on a batch, and save a pass.
      ref_logprobs: None where the algorithm needs them: computed here, from `reference`.

    Returns:
      New parameters and optimiser state, unchanged if the loss or the gradient is not finite;
      scalars, `policy/update_skipped` (0 or 1) and those of the layout among them; and the
      log-probabilities of the tokens before the step, 0 at padding.
    """
    layout = lay_out(batch, plan)
    parts = []
    for rows, tokens, count in _parts(layout, plan):
        values = to_slots(
            (old_logprobs, ref_logprobs, advantages),
            batch.response_mask,
            plan.put(tokens),
            algorithm=algorithm,
            sharding=plan.sharding,
        )
        parts.append((plan.put(rows), SlotValues(*values), count, reference))
    options = {"policy": policy, "temperature": temperature, "algorithm": algorithm}
    if len(parts) == 1:
        params, opt_state, scalars, logprobs = update_rows(
            params, opt_state, *parts[0], optimizer=optimizer, **options
        )
    else:
        program = _bound(row_gradients, **options)
        sums, logprobs = zip(*side_by_side(program, [(params, *part) for part in parts]))
        params, opt_state, scalars = apply_sums(
            params, opt_state, sums, optimizer=optimizer, prefix="policy"
        )
        logprobs = _joined(logprobs)
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


@functools.partial(
    jax.jit, static_argnames=("policy", "temperature", "with_states", "with_entropies")
)
def row_logprobs(
    params: Params,
    rows: TokenRows,
    num_micro: Int[np.ndarray | Array, ""],
    *,
    policy: Policy,
    temperature: float,
    with_states: bool = False,
    with_entropies: bool = False,
) -> RowPass:
    """`batch_logprobs` of the first `num_micro` micro-batches; 0 in the others."""

    def of_micro_batch(micro: TokenRows) -> RowPass:
        states = response_states(params, micro, policy)
        logprobs, entropies = policy.token_logprobs(
            params, states, micro.response_ids, temperature=temperature
        )
        return RowPass(
            logprobs, entropies if with_entropies else None, states if with_states else None
        )

    return over_micro_batches(of_micro_batch, rows, num_micro)


@functools.partial(
    jax.jit,
    static_argnames=("policy", "optimizer", "temperature", "algorithm"),
    donate_argnames=("params", "opt_state"),
)
def update_rows(
    params: Params,
    opt_state: Any,
    rows: TokenRows,
    values: SlotValues,
    num_micro: Int[np.ndarray | Array, ""],
    reference: Params | None = None,
    *,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    temperature: float,
    algorithm: Algorithm,
) -> tuple[Params, Any, Mapping[str, Float[Array, ""]], Float[Array, "M R U"]]:
    """`update_policy` in rows: gradients summed over the first `num_micro` micro-batches."""
    options = {"policy": policy, "temperature": temperature, "algorithm": algorithm}
    sums, logprobs = row_gradients(params, rows, values, num_micro, reference, **options)
    updated = apply_sums(params, opt_state, (sums,), optimizer=optimizer, prefix="policy")
    return *updated, logprobs


@functools.partial(jax.jit, static_argnames=("policy", "temperature", "algorithm"))
def row_gradients(
    params: Params,
    rows: TokenRows,
    values: SlotValues,
    num_micro: Int[np.ndarray | Array, ""],
    reference: Params | None = None,
    *,
    policy: Policy,
    temperature: float,
    algorithm: Algorithm,
) -> tuple[Sums, Float[Array, "M R U"]]:
    """Sums for `update_rows` over the first `num_micro` micro-batches, and log-probabilities."""
    needs = algorithm.needs

    def of_policy(params, rows):
        states = response_states(params, rows, policy)
        return policy.token_logprobs(params, states, rows.response_ids, temperature=temperature)

    def loss_of(params, micro):
        rows, values = micro
        logprobs, entropy = of_policy(params, rows)
        before = jax.lax.stop_gradient(logprobs)
        if needs.old_logprobs and values.old_logprobs is None:
            values = values._replace(old_logprobs=before)
        if needs.reference and values.ref_logprobs is None:
            values = values._replace(ref_logprobs=of_policy(reference, rows)[0])
        ids = {"sequence_ids": rows.sequence_ids} if needs.sequence_ids else {}
        loss, scalars = algorithm.loss(logprobs, entropy, **values._asdict(), **ids)
        return loss, (scalars, before)

    return summed_gradients(params, loss_of, (rows, values), num_micro)


def over_micro_batches(
    function: Callable[[TokenRows], Any], rows: TokenRows, num_micro: Int[np.ndarray | Array, ""]
) -> Any:
    """Results [M, ...] of the first `num_micro` micro-batches; 0 in the others."""

    def write(index, outputs):
        return put(outputs, function(take(rows, index)), index)

    shapes = jax.eval_shape(jax.vmap(function), rows)
    # A bound that is traced: places left over for larger batches cost no arithmetic.
    return jax.lax.fori_loop(0, num_micro, write, zeros_of(shapes))


def summed_gradients(
    params: Params,
    loss_of: Callable[[Params, Any], tuple[Float[Array, ""], tuple[Mapping[str, Array], Any]]],
    inputs: Any,
    num_micro: Int[np.ndarray | Array, ""],
) -> tuple[Sums, Any]:
    """Gradient and scalars, summed over the first `num_micro` micro-batches.

    Args:
      loss_of: loss of one micro-batch of `inputs`; scalars; and a tree of arrays [...] to return.
      inputs: tree of [M, ...].

    Returns:
      The sums; and the trees as [M, ...], 0 in the other micro-batches.
    """

    def accumulate(index, carry):
        sums, outputs = carry
        (_, (scalars, own)), gradient = jax.value_and_grad(loss_of, has_aux=True)(
            params, take(inputs, index)
        )
        return jax.tree.map(jnp.add, sums, (gradient, scalars)), put(outputs, own, index)

    _, (scalars, _) = jax.eval_shape(loss_of, params, take(inputs, 0))
    _, (_, outputs) = jax.eval_shape(jax.vmap(loss_of, (None, 0)), params, inputs)
    start = (jax.tree.map(jnp.zeros_like, params), zeros_of(scalars)), zeros_of(outputs)
    sums, outputs = jax.lax.fori_loop(0, num_micro, accumulate, start)
    return Sums(*sums), outputs


@functools.partial(
    jax.jit,
    static_argnames=("optimizer", "prefix"),
    donate_argnames=("params", "opt_state"),
)
def apply_sums(
    params: Params,
    opt_state: Any,
    parts: Sequence[Sums],
    *,
    optimizer: optax.GradientTransformation,
    prefix: str,
) -> tuple[Params, Any, Mapping[str, Float[Array, ""]]]:
    """One optimiser step on the gradient summed over the parts; `params` and `opt_state` are donated.

    Returns:
      New parameters and optimiser state, unchanged if `<prefix>/loss` or the gradient is not
      finite; and summed scalars, with `<prefix>/grad_norm` and `<prefix>/update_skipped` (0 or 1).
    """
    gradient, scalars = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), parts)
    grad_norm = optax.global_norm(gradient)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(scalars[f"{prefix}/loss"])
    changes, new_opt_state = optimizer.update(gradient, opt_state, params)
    new_params = optax.apply_updates(params, changes)
    keep = functools.partial(jnp.where, finite)
    return (
        jax.tree.map(keep, new_params, params),
        jax.tree.map(keep, new_opt_state, opt_state),
        scalars
        | {
            f"{prefix}/grad_norm": grad_norm,
            f"{prefix}/update_skipped": 1.0 - finite.astype(jnp.float32),
        },
    )


def _parts(
    layout: Layout, plan: RowPlan
) -> list[tuple[TokenRows, Int[np.ndarray, "m R U"], np.int32]]:
    """Rows and `Layout.tokens` of equal parts of the micro-batches, one part per usable core.

    And how many micro-batches of each hold sequences. Part k of n has the micro-batches k, k + n,
    ..., so the filled ones are divided equally.
    """
    arrays = (layout.rows, layout.tokens())
    num_places = len(arrays[1])
    count = next(n for n in range(usable_cores(plan.mesh), 0, -1) if num_places % n == 0)
    return [
        (
            *jax.tree.map(lambda leaf: leaf[k::count], arrays),  # noqa: B023
            np.int32(len(range(k, layout.num_micro, count))),
        )
        for k in range(count)
    ]


def _joined(parts: Sequence[Any]) -> Any:
    """Leaves [M, ...] of the leaves [m, ...] of parts from `_parts`."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *m: jnp.stack(m, axis=1).reshape(-1, *m[0].shape[1:]), *parts)


@functools.lru_cache(maxsize=64)
def _bound(program: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The same object for the same options, as `side_by_side` wants it."""
    return functools.partial(program, **options)


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
