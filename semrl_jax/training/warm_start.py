"""Supervised training on demonstrations: the warm start. Conversations: `fine_tuning`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.data import Demonstrations
from semrl_jax.models import Params, Policy
from semrl_jax.programs import compiled_once, num_side_by_side, side_by_side
from semrl_jax.training.update import split_rows

ADAM_B2 = 0.98
WEIGHT_DECAY = 0.01
WARMUP_STEPS = 20
FINAL_RATE = 0.05
DEMONSTRATION_ORDER = 0xDE30  # last in its seed: apart from every stream of two numbers


def fit_supervised(
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
    """Minimises the mean negative log-probability of the masked tokens with AdamW.

    The rate rises for 20 steps, is constant to the half, then falls linearly to 5 %.

    Args:
      policy: the architecture.
      params: float32 parameters to start from; donated.
      demonstrations: N rows of S columns; the tokens of `loss_mask` are learned.
      num_steps, batch_size, micro_batch_size, learning_rate: as named; micro divides batch.
      seed: of the order of demonstrations.
      report: called with (step, loss in nats a token) after every step.

    Returns:
      The trained parameters.
    """
    rate = optax.join_schedules(
        [
            optax.linear_schedule(0.0, learning_rate, WARMUP_STEPS),
            optax.linear_schedule(
                learning_rate, FINAL_RATE * learning_rate, num_steps - num_steps // 2
            ),
        ],
        [max(num_steps // 2, WARMUP_STEPS)],
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b2=ADAM_B2, weight_decay=WEIGHT_DECAY),
    )
    opt_state = optimizer.init(params)
    columns = tuple(vars(demonstrations).values())  # token, segment, position ids, loss mask
    random = np.random.default_rng((seed, 0, DEMONSTRATION_ORDER))
    num_rows = len(demonstrations.token_ids)
    order = np.concatenate(
        [random.permutation(num_rows) for _ in range(-(-num_steps * batch_size // num_rows))]
    )
    program = functools.partial(_gradients, policy=policy)
    for step in range(num_steps):
        rows = order[step * batch_size : (step + 1) * batch_size]
        batch = tuple(array[rows] for array in columns)
        micro_batches = split_rows(batch, micro_batch_size)
        num_tokens = np.float32(np.count_nonzero(batch[-1]))
        # Equal parts, so that one program computes all.
        count = math.gcd(num_side_by_side(policy.mesh), batch_size // micro_batch_size)
        parts = [tuple(array[k::count] for array in micro_batches) for k in range(count)]
        found = side_by_side(program, [(params, part, num_tokens) for part in parts])
        params, opt_state, loss = _apply(params, opt_state, found, optimizer=optimizer)
        report(step, float(loss))
    return params


@compiled_once
@functools.partial(jax.jit, static_argnames="policy")
def _gradients(
    params: Params,
    micro_batches: tuple[
        Int[Array, "M b S"], Int[Array, "M b S"], Int[Array, "M b S"], Bool[Array, "M b S"]
    ],
    num_tokens: Float[Array, ""],
    *,
    policy: Policy,
) -> tuple[Params, Float[Array, ""]]:
    """Gradient and loss, summed over micro-batches of a batch that learns `num_tokens`."""

    def loss_of(params, micro):
        token_ids, segment_ids, positions, loss_mask = micro
        states = policy.final_states(params, token_ids, positions, segment_ids)
        logprobs, _ = policy.token_logprobs(params, states[:, :-1], token_ids[:, 1:])
        return -jnp.sum(jnp.where(loss_mask[:, 1:], logprobs, 0.0)) / num_tokens

    def accumulate(gradient, micro):
        loss, micro_gradient = jax.value_and_grad(loss_of)(params, micro)
        return jax.tree.map(jnp.add, gradient, micro_gradient), loss

    gradient, losses = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, params), micro_batches)
    return gradient, jnp.sum(losses)


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnames=("params", "opt_state"))
def _apply(
    params: Params,
    opt_state: optax.OptState,
    parts: Sequence[tuple[Params, Float[Array, ""]]],
    *,
    optimizer: optax.GradientTransformation,
) -> tuple[Params, optax.OptState, Float[Array, ""]]:
    """One optimiser step on the sum of the gradients; and the sum of the losses."""
    gradient, loss = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), parts)
    changes, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, changes), opt_state, loss
