"""When given responses enter a group, and what a draw samples."""

import numpy as np
import pytest

from semrl_jax.data import PromptExample
from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.rewards import Verdict
from semrl_jax.sampling.batch_scalars import batch_scalars
from semrl_jax.sampling.exchange import pack_scored, unpack_scored
from semrl_jax.sampling.given import with_given
from semrl_jax.sampling.requests import Draw, training_draw
from semrl_jax.sampling.scoring import Scored, ScoredRollout, num_sampled_tokens, sampled_scalars
from semrl_jax.sampling.selecting import sample_until_kept
from semrl_jax.training.probes.staleness import staleness
from semrl_jax.types import VersionSpan, WeightVersion
from tests.fixtures import make_scored

KEY = MetricKey("effective_rank")
IDS = [np.array(ids, np.int32) for ids in ([7, 8, 1], [9, 1])]


def graded(rollouts):
    """All are correct."""
    verdict = Verdict(1.0, correct=True, boxed=True, extracted=None)
    return Scored([ScoredRollout(rollout, "given", "7", verdict) for rollout in rollouts])


def sampled(scores, size=4):
    """Responses with metrics; with a size below 4, without the last ones of each group."""
    items = [make_scored(i, score=score) for i, score in enumerate(scores)]
    items = [item for item in items if item.rollout.sample_index < size]
    values = np.arange(len(items), dtype=np.float32)
    metrics = {KEY: Measurement(values, np.ones(len(items), bool))}
    return Scored(items, metrics, np.ones((len(items), 1, 3), np.float32))


@pytest.mark.parametrize(("when", "size", "given"), [
    ("always", 2, [2, 3, 6, 7]), ("failed", 4, [6, 7]),
])  # fmt: skip
def test_given_responses_take_the_last_places_of_their_groups(config, when, size, given):
    """The second group has failed. The third one has nothing to give."""
    config.rollout.given_when = when
    scored = sampled([0, 1, 0, 0, *[0] * 8], size)
    groups = [item for item in scored if item.rollout.group_id < 2 or when == "failed"]
    scored = scored.take(range(len(groups)))
    found = with_given(scored, Draw((), {}, {}, given={0: IDS, 1: IDS}), config.rollout, graded)
    keys = [(item.rollout.group_id, item.rollout.sample_index) for item in found]
    assert keys == [divmod(i, 4) for i in range(len(found))]
    assert [i for i, item in enumerate(found) if item.rollout.is_given] == given
    for i, row in enumerate(given):
        rollout = found[row].rollout
        np.testing.assert_array_equal(rollout.response_ids, IDS[i % 2])
        assert np.isnan(rollout.rollout_logprobs).all() and rollout.response_mask.all()
        assert found[row].verdict.correct and not found.metrics[KEY].valid[row]
        assert np.isnan(found.mean_states[row]).all()
    assert num_sampled_tokens(found) == 2 * len(scored)  # also of those that are replaced
    assert num_sampled_tokens(unpack_scored(pack_scored(found))) == 2 * len(scored)
    assert bool(sampled_scalars(found, config.rollout)) == (when == "failed")
    assert found.metrics[KEY].valid.sum() == len(found) - len(given)


def test_without_a_failed_group_nothing_changes(config):
    config.rollout.given_when, scored = "failed", sampled([0, 1, 0, 0])
    assert with_given(scored, Draw((), {}, {}, given={0: IDS}), config.rollout, graded) is scored


@pytest.mark.parametrize(("when", "count", "samples"), [
    ("always", 1, [3, 4]), ("always", 2, [2, 4]), ("always", 3, [2, 4]), ("failed", 2, [4, 4]),
])  # fmt: skip
def test_a_draw_samples_what_is_not_given(config, when, count, samples):
    """The second prompt has no given response; the first one has two."""
    config.rollout.given_responses, config.rollout.given_when = count, when
    examples = [
        PromptExample("1", np.array([3], np.int32), "7", "", number, given=given)
        for number, given in enumerate((tuple(IDS), ()))
    ]
    draw = training_draw(config, 3, 0, examples)
    groups = [request.group_id for request in draw.requests]
    assert [groups.count(group) for group in (6, 7)] == samples
    assert list(draw.given) == [6] and len(draw.given[6]) == min(count, 2)


def test_scalars_are_of_sampled_responses(config):
    """A given one is correct; two sampled ones are not, and have weights of one step before."""
    config.rollout.given_when, scored = "always", sampled([0, 0, 0, 0], 3)
    plain = batch_scalars(scored, np.zeros((1, 3), np.float32))
    draw = Draw((), {}, {}, given={0: IDS[:1]})
    found = with_given(scored, draw, config.rollout, graded)
    scalars = batch_scalars(found, np.array([[0, 0, 0, 1]], np.float32))
    assert (scalars.pop("given/fraction"), scalars.pop("given/correct")) == (0.25, 1.0)
    of_groups = {name: scalars.pop(name) for name in [*scalars] if "group" in name}
    assert of_groups["reward/zero_variance_group_fraction"] == 0
    assert scalars == {name: x for name, x in plain.items() if name not in of_groups}
    span = VersionSpan(WeightVersion("run", "attempt", 4, ""), 0, 2)
    for item in scored:
        object.__setattr__(item.rollout, "versions", (span,))
    assert staleness(found, 5) == {"rollout/staleness": 1.0, "rollout/staleness/max": 1.0}


def test_wrong_responses_that_were_replaced_count_in_the_share_of_correct_ones(config):
    """Two of four are correct in the first group, none in the second."""
    config.rollout.given_when, scored = "failed", sampled([1, 1, 0, 0, 0, 0, 0, 0])
    draw = Draw((), {}, {}, given={1: IDS[:1]})
    found = with_given(scored, draw, config.rollout, graded)
    rewards = np.array([[1, 1, 0, 0], [0, 0, 0, 1]], np.float32)
    scalars = batch_scalars(found, rewards)
    assert (scalars["reward/correct"], scalars["reward/mean"]) == (0.25, 0.25)
    options = {"num_groups": 1, "max_rounds": 1, "keep_by": "reward"}
    scalars = sample_until_kept(lambda *_: found, lambda _: rewards, **options).scalars
    assert (scalars["reward/correct_sampled"], scalars["reward/mean_sampled"]) == (0.25, 0.25)
