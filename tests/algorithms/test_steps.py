"""Algorithms that judge steps: against float64 loops, and what tells them from their neighbours."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from semrl_jax.algorithms.algorithm import Passes, Spans, check_functions
from semrl_jax.shaping import init_shaping_state
from semrl_jax.support.errors import UserError
from tests.algorithms.test_credit import credit_of, make_metrics
from tests.algorithms.test_estimators import advantages_of, algorithm, part_of
from tests.cases import refused
from tests.oracles import algorithms as oracle

seeds = st.integers(0, 2**31 - 1)
GROUPS, LENGTH = 2, 7


class Case:
    """Random responses, of which some have no step; tokens may follow the last step."""

    def __init__(self, seed, size):
        self.random = random = np.random.default_rng(seed)
        self.size, rows = size, GROUPS * size
        self.rewards = random.choice([0.0, 1.0], (GROUPS, size)).astype(np.float32)
        lengths = random.integers(1, LENGTH + 1, rows)
        self.mask = np.arange(LENGTH) < lengths[:, None]
        self.mask[:, 0] |= ~self.mask.any(axis=1)
        self.ends = self.mask & (random.random(self.mask.shape) < random.random((rows, 1)))
        values = random.choice([0.0, -1.0, 0.25], self.mask.shape)
        self.at_ends = np.where(self.ends, values, 0).astype(np.float32)

    @property
    def passes(self):
        return Passes(spans=Spans(jnp.asarray(self.at_ends), jnp.asarray(self.ends)))

    def steps(self, row):
        """Positions of the tokens and reward of each step of a response."""
        found, first = [], 0
        for end in np.flatnonzero(self.ends[row]):
            found.append((list(range(first, end + 1)), float(self.at_ends[row, end])))
            first = end + 1
        return found


def capo(case, outcome, process):
    found = np.zeros(case.mask.shape)
    for first in range(0, len(case.mask), case.size):
        group = slice(first, first + case.size)
        total = np.repeat(outcome * case.rewards.reshape(-1, 1)[group], LENGTH, 1).astype(float)
        for row, own in enumerate(total):
            for places, reward in case.steps(first + row):
                own[places] += process * reward
        found[group] = oracle.whiten(total, case.mask[group])
    return found


@pytest.mark.parametrize("weights", [(2.0, 1.0), (0.5, 3.0)])
@given(seed=seeds)
def test_capo_matches_loops(weights, seed):
    case = Case(seed, 4)
    options = dict(zip(("outcome_weight", "process_weight"), weights))
    found = advantages_of("capo", **options)(case.rewards, case.mask, case.passes)
    # 1e-5: float32 sums over 28 tokens, divided by a deviation, which may be small.
    np.testing.assert_allclose(found, capo(case, *weights), rtol=1e-4, atol=1e-5)


def test_capo_lowers_the_tokens_of_a_wrong_step_alone():
    """Responses 1 and 0 of three tokens; the first one's step of token 1 is wrong.

    R is 2, 1, 2 and 0, 0, 0: mean 5/6, sample variance 29/6 / 5. By turn, GRPO lowers all tokens up
    to the step, and not in relation to the tokens of others.
    """
    mask, rewards = np.ones((2, 3), bool), np.array([[1, 0]], np.float32)
    ends = np.array([[True, True, False], [False] * 3])
    spans = Spans(np.float32([[0, -1, 0], [0, 0, 0]]), ends)
    found = advantages_of("capo")(rewards, mask, Passes(spans=spans))
    expected = (np.array([[2, 1, 2], [0, 0, 0]]) - 5 / 6) / np.sqrt(29 / 30)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    without = Passes(spans=Spans(np.zeros((2, 3), np.float32), ends))
    plain = np.asarray(advantages_of("capo")(rewards, mask, without))
    assert np.ptp(plain, axis=1).max() == 0 and plain[0, 0] > 0 > plain[1, 0]


def test_capo_leaves_steps_of_context_out():
    """A branch has the steps of its prefix, which another response has written."""
    mask, rewards = np.ones((2, 4), bool), np.array([[1, 0]], np.float32)
    mask[1, :2] = False
    ends = np.array([[False] * 4, [False, True, False, True]])
    found = [
        advantages_of("capo")(rewards, mask, Passes(spans=Spans(of_steps, ends)))
        for of_steps in (
            np.float32([[0] * 4, [0, -1, 0, -1]]),
            np.float32([[0] * 4, [0, 0, 0, -1]]),
        )
    ]
    np.testing.assert_array_equal(*found)


def test_capo_of_equal_rewards_has_no_advantage():
    case = Case(0, 4)
    case.rewards[:], case.at_ends[:] = 0.1, 0
    assert not np.asarray(advantages_of("capo")(case.rewards, case.mask, case.passes)).any()


def prof(case, num_removed, penalty=10.0, least=2, most=30):
    """The code of the paper, with lists: which responses are kept; the least gap of two values."""
    steps = [case.steps(row) for row in range(len(case.mask))]
    of_batch = [reward for found in steps for _, reward in found]
    mean = sum(of_batch) / max(len(of_batch), 1)
    kept, gaps = np.ones(case.rewards.shape, bool), [1.0]
    for p, group in enumerate(case.rewards):
        kinds = [[], []]
        for i, reward in enumerate(group):
            found, sign = steps[p * case.size + i], 2 * (reward > 0) - 1
            value = sum(sign * 2 * (s - mean) for _, s in found) / max(len(found), 1)
            value -= penalty * (len(found) < least or len(found) > most)
            kinds[int(reward > 0)].append((value, i))
        wrong, correct = map(sorted, kinds)
        for kind in wrong, correct:
            gaps += filter(None, np.diff([value for value, _ in kind]))
        number = min(num_removed, max(round((len(correct) - len(wrong) + num_removed) / 2), 0))
        for _, i in correct[:number] + wrong[: num_removed - number]:
            kept[p, i] = False
    return kept, min(gaps)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (8, {"num_removed": 4}),
        (8, {"num_removed": 3, "step_penalty": 0.0}),
        (5, {"num_removed": 2, "step_penalty": 0.3, "min_steps": 1, "max_steps": 3}),
    ],
)
@given(seed=seeds)
def test_prof_matches_the_code_of_the_paper(size, options, seed):
    case = Case(seed, size)
    case.at_ends[case.ends] = case.random.normal(size=case.ends.sum())
    renamed = dict(zip(("step_penalty", "min_steps", "max_steps"), ("penalty", "least", "most")))
    expected, gap = prof(case, **{renamed.get(name, name): x for name, x in options.items()})
    assume(gap > 1e-4)  # float32 may order nearly equal values in another way
    found = part_of("selected", "prof", **options)(case.rewards, case.passes, case.mask)
    np.testing.assert_array_equal(found, expected)
    assert (expected.sum(axis=1) == size - options["num_removed"]).all()
    passes = case.passes._replace(selected=found)
    advantages = np.asarray(advantages_of("prof", **options)(case.rewards, case.mask, passes))
    for row, own in enumerate(advantages):
        group, i = divmod(row, size)
        rewards = case.rewards[group][expected[group]]
        of_kept = oracle.group_relative([rewards])[0]
        wanted = dict(zip(np.flatnonzero(expected[group]), of_kept)).get(i, 0.0)
        np.testing.assert_allclose(own, wanted * case.mask[row], rtol=1e-5, atol=1e-6)


def test_prof_that_removes_none_is_grpo():
    case = Case(3, 4)
    passes = case.passes._replace(selected=np.ones(case.rewards.shape, bool))
    options = {"num_removed": 0}
    assert np.asarray(part_of("selected", "prof", **options)(case.rewards, passes, case.mask)).all()
    found = advantages_of("prof", **options)(case.rewards, case.mask, passes)
    np.testing.assert_array_equal(found, advantages_of("grpo")(case.rewards, case.mask))


def test_removed_responses_are_not_trained_on(config):
    """They are chosen by the rewards alone, also where a bonus changes the rewards."""
    case = Case(5, 4)
    config.algorithms.name, config.algorithms.advantage.num_removed = "prof", 2
    for config.shaping.target in ("none", "reward"):
        baselines = init_shaping_state()
        for seed in range(2):  # there is no bonus before there are baselines
            given_ = config, case.rewards, make_metrics(seed), case.mask, baselines
            found = credit_of(*given_, spans=case.passes.spans)
            baselines = found.memory.shaping
        assert ("reward/shaped/mean" in found.scalars) == (config.shaping.target == "reward")
        kept = prof(case, 2)[0].reshape(-1, 1)
        np.testing.assert_array_equal(found.response_mask, case.mask & kept)
        assert found.scalars["algorithm/selected_fraction"] == 0.5
        assert not np.asarray(found.advantages)[~kept[:, 0]].any()


def test_a_function_without_steps_ends_the_run():
    for name in ("capo", "prof"):
        message = f"algorithms.name='{name}' needs rewards of steps, but no response of the batch"
        refused(message, algorithm(name).check_rewards, np.ones((2, 4)), [None] * 8, 7)
        algorithm(name).check_rewards(np.ones((2, 4)), [None] * 8, num_failed=8)
        algorithm(name).check_rewards(np.ones((2, 4)), [np.zeros(0)] * 8)  # no step was found
        check_functions(algorithm(name), group_size=8)
        with pytest.raises(UserError, match=r"advantage\.credit='turn' must be 'episode': the al"):
            algorithm(name, credit="turn")


def test_no_number_of_steps_is_within_crossed_limits():
    limits = {"min_steps": 5, "max_steps": 2}
    refused("min_steps=5 must be at most max_steps=2", algorithm, "prof", **limits)
