"""The plan of passes, and the tokens that are trained on."""

import numpy as np
import pytest

from semrl_jax.algorithms.algorithm import Passes, load_algorithm
from semrl_jax.shaping import init_shaping_state
from semrl_jax.training.passes import NONE, PASS, UPDATE, PassNeeds, PassPlan
from semrl_jax.training.rollout_batch import credited_tokens
from tests.algorithms.test_credit import credit_of, make_metrics
from tests.fixtures import make_scored
from tests.training.test_packing import batch_of

ONE_UPDATE = {"training.prompts_per_minibatch": 4}  # all prompts of a step


def plan_of(config):
    return PassPlan.of(load_algorithm(config.algorithms.to_dict()), config)


def test_a_response_that_was_cut_off_is_not_trained_on(config):
    batch = batch_of([(3, 4), (2, 5), (3, 3)])
    reasons = ("eos", "length", "stop")
    found = credited_tokens(batch, [make_scored(finish_reason=reason) for reason in reasons])
    assert found.truncated.tolist() == [False, True, False]
    config.algorithms.batch_rules.mask_truncated = True
    rewards, mask = np.ones((1, 3), np.float32), batch.response_mask
    arguments = config, rewards, make_metrics(0, 3), mask, init_shaping_state()
    trained = np.asarray(credit_of(*arguments, truncated=found.truncated).response_mask)
    np.testing.assert_array_equal(trained[[0, 2]], mask[[0, 2]])
    assert mask[1].any() and not trained[1].any()


def test_rewards_of_turns_are_at_their_last_tokens():
    masks = [np.array(mask, bool) for mask in ([1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0])]
    batch = batch_of([(1, 4)] * 3, masks)
    rewards = [np.array(given, np.float32) for given in ([2, 3], [4, 5, 6], [])]
    scored = [make_scored(i) for i in range(3)]
    found = credited_tokens(batch, scored, rewards).spans
    assert found.rewards[:, :4].tolist() == [[2, 0, 0, 3], [0, 4, 0, 5], [0, 0, 0, 0]]
    assert not found.rewards[:, 4:].any()
    np.testing.assert_array_equal(found.ends, found.rewards > 0)


def test_rewards_of_steps_are_where_the_steps_end():
    """A step of reward 0 ends, too; without steps, the only turn has no reward of its own."""
    ends, rewards = np.array([0, 2], np.int32), np.array([0, 3], np.float32)
    scored = [make_scored(0, step_ends=ends, step_rewards=rewards), make_scored(1)]
    found = credited_tokens(batch_of([(1, 4)] * 2), scored, [rewards, rewards[:0]]).spans
    assert found.rewards[:, :4].tolist() == [[0, 0, 3, 0], [0, 0, 0, 0]]
    assert found.ends[:, :4].tolist() == [[True, False, True, False], [False] * 4]


PLAIN = {"old": NONE, "reference": NONE, "corrects": NONE}


@pytest.mark.parametrize(
    ("changed", "planned"),
    [
        ({}, {}),
        ({"importance.level": "token"}, {"old": PASS, "corrects": PASS}),
        ({"rollout.max_staleness": 1}, {"old": PASS, "corrects": PASS}),
        ({"rollout.max_staleness": 1, "importance.level_ahead": "none"}, {}),
        ({"loss.surrogate": "clip"}, {"old": PASS}),
        ({"loss.kl_coefficient": 0.1}, {"reference": UPDATE}),
        ({"loss.kl_coefficient": 0.1, "training.offload": ("reference",)}, {"reference": PASS}),
        # A step of one update.
        ({"loss.surrogate": "clip"} | ONE_UPDATE, {"old": UPDATE}),
        ({"importance.level": "token"} | ONE_UPDATE, {"corrects": UPDATE}),
        ({"loss.surrogate": "clip", "lora.dropout": 0.1} | ONE_UPDATE, {"old": PASS}),
        (
            {"importance.level": "token", "lora.dropout": 0.1} | ONE_UPDATE,
            {"old": PASS, "corrects": PASS},
        ),
        ({"importance.level": "sequence"} | ONE_UPDATE, {"old": PASS, "corrects": PASS}),
    ],
)
def test_who_computes_what(config, changed, planned):
    section = config.algorithms
    section.update_from_flattened_dict({"loss.surrogate": "reinforce", "loss.kl_coefficient": 0.0})
    for field, value in changed.items():
        of = config if field.startswith(("rollout.", "training.", "lora.")) else section
        of.update_from_flattened_dict({field: value})
    found = plan_of(config)
    assert {name: getattr(found, name) for name in PLAIN} == PLAIN | planned
    assert not found.values
    given = found.given(Passes("old", "ref"))
    assert given == Passes("old" if found.old == PASS else None, "ref")


def test_what_a_step_needs_from_its_passes(config):
    """PPO with one update per step: nobody computes log-probabilities while the critic warms up."""
    config.update_from_flattened_dict({"algorithms.name": "ppo", "critic.warmup_steps": 1})
    several = plan_of(config)
    config.update_from_flattened_dict(ONE_UPDATE)
    single = plan_of(config)
    asked = PassNeeds(logprobs=True)
    for step, logprobs in ((0, True), (1, False)):
        assert several.needs(step, PassNeeds()) == PassNeeds(logprobs=True)
        for also in (PassNeeds(), asked):
            assert single.needs(step, also) == PassNeeds(logprobs=logprobs)
    assert single.needs(1, asked | PassNeeds(states=True)) == PassNeeds(states=True)
    config.hidden_states.source = "policy"
    states = plan_of(config)
    assert states.has_pass and states.needs(1, PassNeeds()).states and not single.has_pass
