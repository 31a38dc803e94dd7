"""Baselines from step to step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax import shaping
from tests.oracles import shaping as oracle
from tests.shaping import by_name
from tests.shaping.by_name import metrics_of

ERA, ERV, ER = shaping.INDICATORS
MASK = np.ones((2, 3), bool)


def report_of(state, metrics, **options):
    advantages, report = by_name.shape_advantages(
        jnp.ones(MASK.shape), metrics, jnp.asarray(MASK), state, **options
    )
    return np.asarray(advantages), report


@pytest.mark.parametrize("release", [False, True])
def test_baselines_match_loops(release):
    rng = np.random.default_rng(0)
    state, means = shaping.init_shaping_state(), []
    update = jax.jit(
        lambda state, metrics: by_name.update_shaping_state(
            state, metrics, alpha=0.3, reproduce_release=release
        )
    )
    for step in range(8):
        rows = rng.normal(size=(3, 2)).astype(np.float32) + 3
        means.append(None if step in (0, 4) else rows.mean(axis=1))  # 0, 4: nothing valid
        expected = oracle.baselines(means, 0.3, release)[step]
        if expected is not None:
            expected = np.broadcast_to(expected, 3)
            np.testing.assert_allclose(state.baseline, expected, rtol=1e-6, atol=1e-7)
        assert state.baseline_set.all() == (
            any(mean is not None for mean in means[: max(step - release, 0)])
        )
        state = update(state, metrics_of(*rows, valid=means[-1] is not None))
    assert state.num_updates == 8


def test_first_step_is_not_shaped_and_says_so():
    state = shaping.init_shaping_state()
    high = metrics_of([9.0, 9], [9.0, 9], [9.0, 9])
    for release in (False, True):
        advantages, report = report_of(state, high, reproduce_release=release)
        np.testing.assert_array_equal(advantages, 1.0)
        assert report["shaping/active"] == 0.0
        assert report["shaping/phi/mean"] == 0.0
        assert not np.any(by_name.reward_bonus(high, state, reproduce_release=release))
    state = by_name.update_shaping_state(state, metrics_of([1.0, 3], [4.0, 4], [8.0, 8]))
    np.testing.assert_array_equal(state.baseline, [2, 4, 8])
    advantages, report = report_of(state, high)
    assert report["shaping/active"] == 1.0
    assert np.all(advantages > 1.0)


def test_invalid_responses_stay_out_of_the_mean():
    metrics = metrics_of([1.0, np.nan, 7.0], [2.0, 9.0, 8.0], [3.0, 9.0, 9.0])
    metrics[f"{ERA}_valid"] = np.array([True, True, False])
    state = by_name.update_shaping_state(shaping.init_shaping_state(), metrics)
    # Response 2 is not finite, response 3 has no ERA: neither is shaped, neither is a baseline.
    np.testing.assert_array_equal(state.baseline, [1, 2, 3])
    zeros = by_name.update_shaping_state(
        shaping.init_shaping_state(), metrics, reproduce_release=True
    )
    # Response 3 is too short and counts; response 2 is not finite and never counts.
    np.testing.assert_allclose(zeros.pending, [1 / 2, 10 / 2, 12 / 2], rtol=1e-6)
    half = by_name.update_shaping_state(shaping.init_shaping_state(), metrics, mixing="half")
    np.testing.assert_allclose(half.baseline, [1, 19 / 3, 21 / 3], rtol=1e-6)


def test_reward_average_starts_at_zero_and_skips_what_is_not_finite():
    state = shaping.init_shaping_state()
    batch = metrics_of([1.0], [1.0], [1.0])
    for mean_reward, expected in ((1.0, 0.3), (-1.0, -0.09), (None, -0.09), (np.nan, -0.09)):
        state = by_name.update_shaping_state(state, batch, mean_reward=mean_reward)
        np.testing.assert_allclose(state.reward_ema, expected, rtol=1e-5)


def test_state_is_a_pytree_of_fixed_shapes_and_no_shared_buffers():
    state = shaping.init_shaping_state()
    update = jax.jit(by_name.update_shaping_state, donate_argnums=0)
    batch = metrics_of([1.0], [1.0], [1.0])
    after = update(update(state, batch), batch)
    fresh = shaping.init_shaping_state()
    for old, new in zip(jax.tree.leaves(fresh), jax.tree.leaves(after)):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
    assert update._cache_size() == 1
