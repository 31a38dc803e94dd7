"""The jitted update: micro-batches change nothing, broken batches change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax import models
from semrl_jax.training.state import make_optimizer
from semrl_jax.training.update import batch_logprobs, join_rows, split_rows, update_policy
from semrl_jax.types import RolloutBatch

OPTIMIZER = make_optimizer(
    learning_rate=1e-2, learning_rate_warmup_steps=0, adam_b1=0.9, adam_b2=0.99,
    weight_decay=0.01, max_grad_norm=1.0,
)  # fmt: skip
LOSS = (
    ("clip_epsilon", 0.2), ("entropy_coefficient", 0.01), ("kl_coefficient", 0.1),
    ("kl_estimator", "low_var_kl"),
)  # fmt: skip


@pytest.fixture(scope="module")
def policy():
    return models.Policy(
        models.DecoderConfig(
            vocab_size=23, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=2,
            num_kv_heads=1, head_dim=16,
        )
    )  # fmt: skip


@pytest.fixture
def batch():
    """8 rows, 4 prompt and 10 response columns, ragged."""
    random = np.random.default_rng(0)
    segments = np.ones((8, 14), np.int32)
    for row in range(8):
        segments[row, : random.integers(0, 4)] = 0
        segments[row, 5 + random.integers(0, 10) :] = 0
    ids = random.integers(0, 23, (8, 14)).astype(np.int32)
    return jax.device_put(
        RolloutBatch(
            ids, np.maximum(np.cumsum(segments, 1) - 1, 0).astype(np.int32) * segments, segments,
            segments[:, 4:] == 1, np.zeros((8, 10), np.float32), np.zeros(8, np.float32),
        )
    )  # fmt: skip


def run(policy, params, batch, micro_batch_size, advantages, aggregation="token_mean"):
    params = jax.tree.map(jnp.copy, params)  # donated
    old = batch_logprobs(
        params, batch, policy=policy, temperature=1.0, micro_batch_size=micro_batch_size
    ).logprobs
    return update_policy(
        params, OPTIMIZER.init(params), batch, old - 0.1, old + 0.2, advantages,
        policy=policy, optimizer=OPTIMIZER, temperature=1.0, micro_batch_size=micro_batch_size,
        aggregation=aggregation, loss_options=LOSS,
    )  # fmt: skip


@pytest.mark.parametrize("aggregation", ["token_mean", "response_mean"])
def test_micro_batches_change_nothing_but_rounding(policy, batch, aggregation):
    params = policy.init(jax.random.key(0))
    advantages = jax.random.normal(jax.random.key(1), (8, 10))
    whole, _, scalars = run(policy, params, batch, 8, advantages, aggregation)
    for size in (1, 4):
        parts, _, part_scalars = run(policy, params, batch, size, advantages, aggregation)
        for name, value in scalars.items():
            np.testing.assert_allclose(part_scalars[name], value, rtol=1e-4, atol=1e-6)
        # Adam divides by the root of the second moment: where a gradient is all rounding, so is
        # its step. Steps are 1e-2, and all but a few entries agree to 1 % of one.
        off = [
            np.mean(np.abs(a - b) > 1e-4)
            for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(whole))
        ]
        assert max(off) < 0.01
    assert not np.allclose(whole["embed"]["embedding"], params["embed"]["embedding"])


def test_logprobs_do_not_depend_on_the_micro_batch(policy, batch):
    params = policy.init(jax.random.key(0))
    results = [
        batch_logprobs(
            params,
            batch,
            policy=policy,
            temperature=0.5,
            micro_batch_size=size,
            with_states=True,
            with_entropies=True,
        )
        for size in (1, 2, 8)
    ]
    mask = np.asarray(batch.response_mask)
    for found in results[1:]:
        for actual, expected in zip(found, results[0]):
            np.testing.assert_allclose(actual[mask], expected[mask], atol=1e-5, rtol=1e-4)


def test_a_nonfinite_update_is_skipped(policy, batch):
    params = policy.init(jax.random.key(0))
    advantages = jnp.ones((8, 10)).at[0, 0].set(jnp.inf)
    assert bool(batch.response_mask[0, 0])
    new_params, opt_state, scalars = run(policy, params, batch, 4, advantages)
    assert float(scalars["policy/update_skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, new_params, params)
    jax.tree.map(np.testing.assert_array_equal, opt_state, OPTIMIZER.init(params))


def test_nan_at_padding_is_not_seen(policy, batch):
    params = policy.init(jax.random.key(0))
    clean = jax.random.normal(jax.random.key(1), (8, 10))
    dirty = jnp.where(batch.response_mask, clean, jnp.nan)
    for a, b in zip(
        jax.tree.leaves(run(policy, params, batch, 4, clean)),
        jax.tree.leaves(run(policy, params, batch, 4, dirty)),
    ):
        np.testing.assert_array_equal(a, b)


def test_rows_split_without_moving_between_shards():
    rows = jnp.arange(12)
    split = split_rows(rows, 4)
    np.testing.assert_array_equal(split[0], [0, 3, 6, 9])
    np.testing.assert_array_equal(join_rows(split), rows)


def test_learning_rate_warms_up():
    optimizer = make_optimizer(
        learning_rate=1.0, learning_rate_warmup_steps=4, adam_b1=0.9, adam_b2=0.9,
        weight_decay=0.0, max_grad_norm=1e9,
    )  # fmt: skip
    params, gradient = jnp.zeros(1), jnp.ones(1)
    state, steps = optimizer.init(params), []
    for _ in range(6):
        change, state = optimizer.update(gradient, state, params)
        steps.append(-float(change[0]))
    # Adam's step for a constant gradient is the rate.
    np.testing.assert_allclose(steps, [0.25, 0.5, 0.75, 1, 1, 1], rtol=1e-5)
