"""Rewards of the batch, and how the options reach estimator and shaping."""

import jax.numpy as jnp
import numpy as np

from semrl_jax.algorithms.algorithm import Passes, load_algorithm
from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.shaping import init_shaping_state
from semrl_jax.training import advantages
from semrl_jax.training.advantages import group_rewards, next_baselines
from tests.fixtures import make_scored

INDICATORS = ("effective_rank_acceleration", "effective_rank_velocity", "effective_rank")


def shaped_advantages(rewards, metrics, mask, state, config):
    algorithm = load_algorithm(config.algorithms.to_dict())
    return advantages.shaped_advantages(algorithm, rewards, Passes(), metrics, mask, state, config)


def make_metrics(seed=0, num=8):
    random = np.random.default_rng(seed)
    return {
        key: Measurement(random.uniform(1, 2, num).astype(np.float32), np.ones(num, bool))
        for key in map(MetricKey.parse, INDICATORS)
    }


def test_shuffled_rewards_are_the_same_rewards_elsewhere(config):
    scored = [make_scored(i, score=float(i)) for i in range(16)]
    plain = group_rewards(scored, config, 3)
    np.testing.assert_array_equal(plain, np.arange(16, dtype=np.float32).reshape(4, 4))
    config.rewards.shuffle = True
    shuffled = group_rewards(scored, config, 3)
    assert (shuffled != plain).any()
    np.testing.assert_array_equal(np.sort(shuffled.ravel()), plain.ravel())
    np.testing.assert_array_equal(shuffled, group_rewards(scored, config, 3))
    assert (shuffled != group_rewards(scored, config, 4)).any()


def test_options_reach_estimator_and_shaping(config):
    """By hand: the first batch sets the baselines, the second is shaped against them."""
    rewards = np.array([[1, 0, 0, 1], [1, 1, 1, 1]], np.float32)
    mask = jnp.ones((8, 3), bool)
    state = init_shaping_state()
    first, report = shaped_advantages(rewards, make_metrics(), mask, state, config)
    std = np.std([1, 0, 0, 1], ddof=1)
    plain = np.repeat([0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0], 3).reshape(8, 3) / (std + 1e-6)
    np.testing.assert_allclose(first, plain, rtol=1e-6)
    assert report["shaping/active"] == 0
    state = next_baselines(state, make_metrics(), rewards, config)
    np.testing.assert_allclose(
        state.baseline, [found.value.mean() for found in make_metrics().values()], rtol=1e-6
    )
    shaped, report = shaped_advantages(rewards, make_metrics(1), mask, state, config)
    bonus = np.asarray(shaped) - np.asarray(first)
    assert report["shaping/active"] == 1 and (bonus >= 0).all() and (bonus[:4] > 0).any()
    np.testing.assert_array_equal(bonus[4:], 0)  # equal rewards leave nothing to shape
    config.shaping.eta = 0.0
    np.testing.assert_allclose(
        shaped_advantages(rewards, make_metrics(1), mask, state, config)[0], plain, rtol=1e-6
    )


def test_the_signal_may_go_into_the_reward(config):
    rewards = np.array([[1, 0, 0, 1], [1, 1, 1, 1]], np.float32)
    mask = jnp.ones((8, 3), bool)
    state = next_baselines(init_shaping_state(), make_metrics(), rewards, config)
    config.shaping.target = "reward"
    shaped, _ = shaped_advantages(rewards, make_metrics(1), mask, state, config)
    assert (np.asarray(shaped)[4:] != 0).any()  # Phi breaks the tie of equal rewards


def test_baselines_stay_where_nothing_is_measured(config):
    state = init_shaping_state()
    assert next_baselines(state, {}, np.zeros((2, 4), np.float32), config) is state
