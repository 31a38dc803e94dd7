"""Group-relative and generalised advantages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax import algorithms
from tests.cases import raised
from tests.oracles import algorithms as oracle

seeds = st.integers(0, 2**31 - 1)
group_relative = jax.jit(algorithms.group_relative_advantages)
whiten = jax.jit(algorithms.whiten)


@given(seed=seeds)
def test_group_relative_advantages_match_float64(seed):
    rng = np.random.default_rng(seed)
    rewards = rng.choice([-1.0, -0.5, 0.0, 0.5, 1.0], size=(3, 4)).astype(np.float32)
    rewards += rng.choice([0.0, 1000.0])
    actual = group_relative(rewards)
    np.testing.assert_allclose(actual, oracle.group_relative(rewards), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.sum(actual, axis=1), 0.0, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, -0.3, 1e6])
def test_equal_rewards_have_zero_advantages(value):
    rewards = np.full((2, 3), value, np.float32)  # the mean of three 0.1 is not 0.1
    np.testing.assert_array_equal(group_relative(rewards), 0.0)
    assert jax.jit(algorithms.zero_variance_group_fraction)(rewards) == 1.0
    rewards[0, 1] += 1.0
    assert jax.jit(algorithms.zero_variance_group_fraction)(rewards) == 0.5


def test_groups_of_one_are_refused():
    for function in (algorithms.group_relative_advantages, algorithms.zero_variance_group_fraction):
        raised(ValueError, r"shape \(3, 1\).*rollout.group_size", function, jnp.ones((3, 1)))


@given(seed=seeds, gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.7, 0.0]))
def test_generalized_advantages_match_loops(seed, gamma, lam):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, 3, 7)).astype(np.float32)
    mask = rng.random((3, 7)) < 0.7  # holes, as between turns
    expected = oracle.generalized(rewards, values, mask, gamma, lam)
    rewards[~mask] = values[~mask] = np.nan
    actual = _generalized(gamma, lam)(rewards, values, mask)
    for a, b in zip(actual, expected):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)  # a float32 sum of seven


@functools.cache
def _generalized(gamma, lam):
    return jax.jit(
        functools.partial(algorithms.generalized_advantages, gamma=gamma, gae_lambda=lam)
    )


@given(seed=seeds, num_valid=st.integers(0, 12))
def test_whitening_matches_float64(seed, num_valid):
    rng = np.random.default_rng(seed)
    mask = rng.permutation(np.arange(12) < num_valid).reshape(3, 4)
    values = (rng.normal(size=(3, 4)) * 3 + 50).astype(np.float32)
    expected = oracle.whiten(values, mask)
    values[~mask] = np.nan
    np.testing.assert_allclose(whiten(values, mask), expected, rtol=1e-4, atol=1e-5)


def test_whitening_equal_values_gives_zero():
    np.testing.assert_array_equal(
        whiten(np.full((3, 5), 0.1, np.float32), np.ones((3, 5), bool)), 0
    )


def test_explained_variance_by_hand():
    returns = np.array([[0.0, 2.0, np.nan]], np.float32)
    mask = np.array([[True, True, False]])
    explained = jax.jit(algorithms.explained_variance)
    assert explained(returns, returns, mask) == 1.0
    assert explained(np.zeros((1, 3), np.float32), returns, mask) == 0.0
    assert explained(returns / 2, returns, mask) == 0.75
    assert explained(returns, np.ones((1, 3), np.float32), mask) == 0.0


def test_rounding_of_equal_returns_is_no_variance():
    """All responses have one reward, so all returns are equal but for the rounding of the sums."""
    rng = np.random.default_rng(0)
    mask = np.arange(64) < rng.integers(1, 65, 16)[:, None]
    last = mask & (np.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1)
    values = rng.normal(size=mask.shape).astype(np.float32)
    rewards = -last.astype(np.float32)
    _, returns = jax.jit(algorithms.generalized_advantages)(rewards, values, mask)
    assert np.ptp(np.asarray(returns)[mask]) > 0
    explained = jax.jit(algorithms.explained_variance)
    assert explained(values, returns, mask) == 0.0
    same = np.full(mask.shape, 0.1, np.float32)  # their mean is not 0.1
    assert explained(values, same, mask) == 0.0


def test_advantages_match_the_recorded_ones(golden):
    data = np.load(golden / "rl_losses.npz")
    mask = data["mask"].astype(bool)
    rewards = data["token_level_rewards"].sum(axis=1)
    order = np.argsort(data["uid"], kind="stable")
    groups = rewards[order].reshape(len(set(data["uid"].tolist())), -1)
    actual = np.empty(len(rewards), np.float32)
    actual[order] = np.asarray(group_relative(groups)).reshape(-1)
    # 1e-5: another order of float32 sums.
    np.testing.assert_allclose(
        algorithms.broadcast_to_tokens(jnp.asarray(actual), jnp.asarray(mask)),
        data["grpo_advantages"],
        rtol=1e-5,
        atol=1e-6,
    )
    advantages, returns = _generalized(0.99, 0.95)(
        data["token_level_rewards"], data["values"], mask
    )
    np.testing.assert_allclose(
        whiten(advantages, mask), np.where(mask, data["gae_advantages"], 0.0), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        returns, np.where(mask, data["gae_returns"], 0.0), rtol=1e-5, atol=1e-5
    )
