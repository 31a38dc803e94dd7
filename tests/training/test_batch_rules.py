"""Rules for whole batches: the penalty of long responses, and those that are cut off."""

import numpy as np
import pytest

from semrl_jax.rewards.overlong import overlong_penalty
from semrl_jax.runs import validate
from semrl_jax.training.advantages import group_rewards
from semrl_jax.training.rollout_batch import without_truncated
from tests.fixtures import make_scored
from tests.training.test_packing import batch_of


def test_the_penalty_grows_over_the_buffer():
    lengths = np.array([1, 60, 70, 80, 100, 120])
    expected = [0, 0, -0.25, -0.5, -1, -1]
    found = overlong_penalty(lengths, limit=100, buffer=40)
    np.testing.assert_allclose(found, expected)
    assert found.dtype == np.float32


def test_long_responses_lose_reward(config):
    scored = [make_scored(i, score=1.0) for i in range(16)]
    plain = group_rewards(scored, config, 0)
    (length,) = {len(item.rollout.response_ids) for item in scored}
    config.rollout.max_response_tokens = 2 * length
    config.algorithms.batch_rules.overlong_tokens = 2 * length
    np.testing.assert_allclose(group_rewards(scored, config, 0), plain - 0.5)
    config.algorithms.batch_rules.overlong_tokens = length
    np.testing.assert_array_equal(group_rewards(scored, config, 0), plain)
    config.shaping.target = "none"
    config.algorithms.batch_rules.overlong_tokens = 2 * length + 1
    with pytest.raises(ValueError, match=r"overlong_tokens=\d+ must be at most rollout.max_resp"):
        validate(config)


def test_a_response_that_was_cut_off_is_not_trained_on():
    batch = batch_of([(3, 4), (2, 5), (3, 3)])
    reasons = ("eos", "length", "stop")
    rollouts = [make_scored(finish_reason=reason).rollout for reason in reasons]
    found = without_truncated(batch, rollouts)
    np.testing.assert_array_equal(found.response_mask[[0, 2]], batch.response_mask[[0, 2]])
    assert batch.response_mask[1].any() and not found.response_mask[1].any()
