"""Supervised training on demonstrations: the warm start. Conversations: `fine_tuning`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.cores import side_by_side, usable_cores
from semrl_jax.data import Demonstrations
from semrl_jax.models import Params, Policy
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
    gradients = functools.partial(_gradients, policy=policy)
    cores = usable_cores(policy.mesh)
    for step in range(num_steps):
        rows = order[step * batch_size : (step + 1) * batch_size]
        batch = tuple(array[rows] for array in columns)
        num_tokens = np.float32(np.count_nonzero(batch[-1]))
        micro = split_rows(batch, micro_batch_size)
        count = next(n for n in range(cores, 0, -1) if len(micro[0]) % n == 0)
        parts = [(params, tuple(x[k::count] for x in micro), num_tokens) for k in range(count)]
        sums, losses = zip(*side_by_side(gradients, parts))
        params, opt_state = _apply(params, opt_state, sums, optimizer=optimizer)
        report(step, float(sum(losses)))
    return params


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
    """The gradient and the loss, summed over micro-batches of a batch of `num_tokens`."""

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
    parts: Sequence[Params],
    *,
    optimizer: optax.GradientTransformation,
) -> tuple[Params, optax.OptState]:
    gradient = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), parts)
    changes, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, changes), opt_state
