"""Log-probabilities of a batch, and one optimiser step on a mini-batch; both in micro-batches.

A micro-batch takes every M-th row, so that rows sharded over the data axes stay where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from semrl_jax.algorithms import policy_loss, token_weights
from semrl_jax.models import Params, Policy
from semrl_jax.types import RolloutBatch


class TokenPass(NamedTuple):
    """What a forward pass says of B responses; finite and meaningless at padding.

    Attributes:
      logprobs: of each token, float32 nats.
      entropies: of the distribution each token was drawn from, float32 nats; None unless asked for.
      states: in the compute dtype; None unless asked for.
    """

    logprobs: Float[Array, "B T"]
    entropies: Float[Array, "B T"] | None
    states: Float[Array, "B T D"] | None


def response_states(params: Params, batch: RolloutBatch, policy: Policy) -> Float[Array, "B T D"]:
    """Final states in the compute dtype; row t is the state whose logits produced token t."""
    states = policy.final_states(params, batch.token_ids, batch.positions, batch.segment_ids)
    num_prompt_columns = batch.token_ids.shape[1] - batch.response_mask.shape[1]
    return states[:, num_prompt_columns - 1 : -1]


@functools.partial(
    jax.jit,
    static_argnames=(
        "policy", "temperature", "micro_batch_size", "with_states", "with_entropies",
    ),
)  # fmt: skip
def batch_logprobs(
    params: Params,
    batch: RolloutBatch,
    *,
    policy: Policy,
    temperature: float,
    micro_batch_size: int,
    with_states: bool = False,
    with_entropies: bool = False,
) -> TokenPass:
    """Log-probabilities of all responses under `params`, and whatever else is asked for."""

    def of_micro_batch(micro: RolloutBatch):
        states = response_states(params, micro, policy)
        logprobs, entropies = policy.token_logprobs(
            params, states, micro.response_ids, temperature=temperature
        )
        return TokenPass(
            logprobs, entropies if with_entropies else None, states if with_states else None
        )

    outputs = jax.lax.map(of_micro_batch, split_rows(batch, micro_batch_size))
    return join_rows(outputs)


@functools.partial(
    jax.jit,
    static_argnames=(
        "policy",
        "optimizer",
        "temperature",
        "micro_batch_size",
        "aggregation",
        "loss_options",
    ),
    donate_argnames=("params", "opt_state"),
)
def update_policy(
    params: Params,
    opt_state: Any,
    batch: RolloutBatch,
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    temperature: float,
    micro_batch_size: int,
    aggregation: str,
    loss_options: tuple[tuple[str, Any], ...],
) -> tuple[Params, Any, Mapping[str, Float[Array, ""]]]:
    """One AdamW step on one mini-batch, gradients summed over micro-batches.

    The token weights sum to 1 over the mini-batch, so its split into micro-batches changes nothing
    but rounding.

    Returns:
      New parameters and optimiser state, unchanged if the loss or the gradient is not finite; and
      scalars, `policy/update_skipped` (0 or 1) among them.
    """
    weights = token_weights(batch.response_mask, aggregation=aggregation)

    def loss_of(params, micro):
        rows, old, ref, advantage, weight = micro
        states = response_states(params, rows, policy)
        logprobs, entropy = policy.token_logprobs(
            params, states, rows.response_ids, temperature=temperature
        )
        return policy_loss(
            logprobs,
            entropy,
            old_logprobs=old,
            ref_logprobs=ref,
            advantages=advantage,
            weights=weight,
            **dict(loss_options),
        )

    def accumulate(gradient, micro):
        (_, scalars), micro_gradient = jax.value_and_grad(loss_of, has_aux=True)(params, micro)
        return jax.tree.map(jnp.add, gradient, micro_gradient), scalars

    gradient, scalars = jax.lax.scan(
        accumulate,
        jax.tree.map(jnp.zeros_like, params),
        split_rows((batch, old_logprobs, ref_logprobs, advantages, weights), micro_batch_size),
    )
    scalars = {name: jnp.sum(values) for name, values in scalars.items()}
    grad_norm = optax.global_norm(gradient)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(scalars["policy/loss"])
    changes, new_opt_state = optimizer.update(gradient, opt_state, params)
    new_params = optax.apply_updates(params, changes)
    keep = functools.partial(jnp.where, finite)
    return (
        jax.tree.map(keep, new_params, params),
        jax.tree.map(keep, new_opt_state, opt_state),
        scalars
        | {
            "policy/grad_norm": grad_norm,
            "policy/update_skipped": 1.0 - finite.astype(jnp.float32),
        },
    )


def split_rows(tree: Any, micro_batch_size: int) -> Any:
    """[B, ...] leaves to [M, b, ...]; micro-batch m holds rows m, m + M, ..."""

    def split(leaf):
        num_micro = leaf.shape[0] // micro_batch_size
        assert num_micro * micro_batch_size == leaf.shape[0], "validated with the config"
        return leaf.reshape(micro_batch_size, num_micro, *leaf.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, tree)


def join_rows(tree: Any) -> Any:
    """Undoes `split_rows`."""

    def join(leaf):
        return leaf.swapaxes(0, 1).reshape(-1, *leaf.shape[2:])

    return jax.tree.map(join, tree)
