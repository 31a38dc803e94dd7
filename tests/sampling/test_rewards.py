"""Rewards of the batch."""

import dataclasses

import numpy as np

from semrl_jax.runs import validate
from semrl_jax.sampling.batch_rewards import group_rewards, overlong_penalty, span_rewards
from tests.cases import raised
from tests.fixtures import make_scored


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


def test_the_majority_of_a_group_is_rewarded(config):
    """Equal answers by their normalised text; the first of two with as many votes; no answer."""
    config.rewards.majority = True
    answers = [
        "2", "3", "3.", None,  # the second and the third agree
        "1", "4", "4", "1",
        None, None, "", None,
        "5", None, None, None,
    ]  # fmt: skip
    scored = [make_scored(i, score=1.0) for i in range(16)]
    scored = [
        dataclasses.replace(item, verdict=dataclasses.replace(item.verdict, extracted=answer))
        for item, answer in zip(scored, answers)
    ]
    expected = [[0, 1, 1, 0], [1, 0, 0, 1], [0] * 4, [1, 0, 0, 0]]
    found = group_rewards(scored, config, 0)
    np.testing.assert_array_equal(found, np.float32(expected))
    assert found.dtype == np.float32


def test_turns_and_steps_go_where_the_rewards_of_their_responses_go(config):
    """None for a response without an environment and steps, or whose environment failed."""
    scored = []
    for index in range(16):
        item = make_scored(index, score=float(index))
        rewards = None if index == 2 else np.full(1 + index % 3, index, np.float32)
        error = "timeout: 2 s" * (index == 3)
        kind = "step_rewards" if index % 4 == 1 else "turn_rewards"
        episode = {kind: rewards, "environment_error": error}
        scored.append(
            dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, **episode))
        )
    for config.rewards.shuffle in (False, True):
        found = span_rewards(scored, config, 3)
        for index, rewards in zip(group_rewards(scored, config, 3).ravel().astype(int), found):
            assert (rewards is None) == (index in (2, 3))
            assert rewards is None or rewards.tolist() == [index] * (1 + index % 3)


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
    raised(ValueError, r"overlong_tokens=\d+ must be at most rollout.max_resp", validate, config)
