"""Credit by turn and step: against float64 loops, and what credit by episode has in common."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax.algorithms.algorithm import Passes, Spans
from semrl_jax.algorithms.turn_credit import placed_rewards
from tests.algorithms import test_estimators as estimators
from tests.algorithms.test_estimators import NAMES, advantages_of, algorithm, part_of
from tests.cases import slow_after
from tests.oracles import algorithms as oracle

OTHERS = ("capo", "prof", "single_stream", "smooth_standardisation")
TURNS = [name for name in NAMES if name not in OTHERS]

seeds = st.integers(0, 2**31 - 1)
GROUPS, SIZE, LENGTH = 2, 4, 13
KL = {"kl_coefficient": 0.0, "kl_reward_coefficient": 0.3}
placed = jax.jit(placed_rewards)


def grpo(returns, lengths):
    return oracle.group_relative([returns])[0]


COMPARING = {f.__name__: f for f in (*estimators.ORACLES, grpo)}
# The advantage of a turn that no other response of the group has, where it is not 0.
ALONE = {
    "asymre": lambda r, lengths: r - r + 0.1,
    "sample_reinforcement": COMPARING["sample_reinforcement"],
}


class Case:
    """Random responses with context between their turns, and a reward for each turn or step."""

    def __init__(self, seed, one_turn=False, steps=False):
        self.random = random = np.random.default_rng(seed)
        self.mask = random.random((GROUPS * SIZE, LENGTH)) < 0.6
        if one_turn:
            starts, ends = np.sort(random.integers(0, LENGTH, (2, len(self.mask))), axis=0)
            place = np.arange(LENGTH)
            self.mask = (starts[:, None] <= place) & (place <= ends[:, None])
        self.mask[
            np.arange(len(self.mask)), random.integers(0, LENGTH, len(self.mask))
        ] |= ~self.mask.any(axis=1)
        inside = steps * self.mask & (random.random(self.mask.shape) < random.random())
        self.places = [
            oracle.turns(row, np.flatnonzero(own)) for row, own in zip(self.mask, inside)
        ]
        self.rewards = [random.choice([0.0, 0.5, 1.0], len(turns)) for turns in self.places]
        self.episodes = np.array(list(map(np.sum, self.rewards))).reshape(GROUPS, SIZE)
        self.at_ends = np.zeros(self.mask.shape, np.float32)
        self.ends = np.zeros(self.mask.shape, bool)
        for row, turns, rewards in zip(range(len(self.mask)), self.places, self.rewards):
            ends = [turn[-1] for turn in turns]
            self.at_ends[row, ends], self.ends[row, ends] = rewards, True
        self.logprobs = random.normal(size=(3, *self.mask.shape)).astype(np.float32)
        self.state = {"rewards": np.float32(1.5), "weights": np.float32(2.0)}

    @property
    def passes(self):
        """Old and reference log-probabilities and values; NaN at context."""
        passes = (np.where(self.mask, x, np.float32(np.nan)) for x in self.logprobs)
        return Passes(*passes, spans=Spans(self.at_ends, self.ends))

    @property
    def placed(self):
        episodes = self.episodes.astype(np.float32)
        return placed(episodes, self.at_ends, self.mask)

    def advantages(self, name, credit="turn", **options):
        rewards = self.placed if credit == "turn" else self.episodes.astype(np.float32)
        of = advantages_of(name, credit=credit, **options)
        state = self.state
        if name != "reinforce":
            state = algorithm(name).first_state(num_prompts=GROUPS) or None
        return np.asarray(of(jnp.asarray(rewards), self.mask, self.passes, state))


@pytest.mark.parametrize("name", COMPARING)
@given(seed=seeds, steps=st.booleans())
def test_turns_are_compared_with_the_same_turns_of_their_group(name, seed, steps):
    case, estimate = Case(seed, steps=steps), COMPARING[name]

    def of_group(returns, lengths):
        alone = ALONE.get(name, lambda r, lengths: 0 * r)
        return (estimate if len(returns) > 1 else alone)(returns, lengths)

    expected = oracle.by_turn(of_group, case.rewards, case.mask, SIZE, case.places)
    # 1e-5: returns up to 7 in float32, less a baseline; divided by a deviation or a mean.
    np.testing.assert_allclose(case.advantages(name), expected, rtol=1e-5, atol=1e-5)


@given(seed=seeds)
def test_the_running_baseline_is_subtracted_from_returns(seed):
    case = Case(seed)
    expected = oracle.by_turn(lambda r, lengths: r - 0.75, case.rewards, case.mask, SIZE)
    np.testing.assert_allclose(case.advantages("reinforce"), expected, rtol=1e-6, atol=1e-6)


def with_kl(case):
    """The rewards of turns at their ends, less 0.3 (old - ref) at every token."""
    old, ref, _ = case.logprobs.astype(np.float64)
    return np.where(case.mask, case.at_ends - 0.3 * (old - ref), 0)


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.9, 0.5)])
@given(seed=seeds, steps=st.booleans())
def test_ppo_has_turns_as_steps(gamma, gae_lambda, seed, steps):
    case, options = Case(seed, steps=steps), {"gamma": gamma, "gae_lambda": gae_lambda, **KL}
    estimates, returns = oracle.generalized_by_turn(
        with_kl(case), case.logprobs[2], case.mask, gamma, gae_lambda, case.places
    )
    # 1e-5: float32 sums over 13 tokens, divided by a deviation near 1.
    expected = oracle.whiten(estimates, case.mask)
    np.testing.assert_allclose(case.advantages("ppo", **options), expected, rtol=1e-4, atol=1e-5)
    of = part_of("returns", "ppo", credit="turn", **options)
    found = of(case.placed, case.passes, case.mask)
    np.testing.assert_allclose(found, returns, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group_baseline", [False, True])
@given(seed=seeds, steps=st.booleans())
def test_reinforce_plus_plus_matches_loops(group_baseline, seed, steps):
    case = Case(seed, steps=steps)
    less = COMPARING["dr_grpo"] if group_baseline else lambda r, lengths: r
    kl = with_kl(case) - np.where(case.mask, case.at_ends, 0)
    returns = oracle.by_turn(less, case.rewards, case.mask, SIZE, case.places)
    returns += np.cumsum(kl[:, ::-1], axis=1)[:, ::-1]
    found = case.advantages("reinforce_plus_plus", group_baseline=group_baseline, **KL)
    np.testing.assert_allclose(found, oracle.whiten(returns, case.mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TURNS)
def test_one_turn_has_the_credit_of_its_episode(name):
    for seed in range(3):
        case = Case(seed, one_turn=True)
        expected = case.advantages(name, credit="episode")
        np.testing.assert_array_equal(case.advantages(name), expected)


def moved(values, places, keep):
    """The tokens of turns [B, T] with `keep` tokens of context between turns."""
    columns = []
    for turns in places:
        row = [t for turn in turns for t in (*turn, *[LENGTH] * keep)]
        columns.append(row + [LENGTH] * (2 * LENGTH - len(row)))
    return np.take_along_axis(np.pad(values, ((0, 0), (0, 1))), np.array(columns), axis=1)


@functools.cache
def gradients_of(name, credit):
    """A compiled function: the losses' gradients by each token's log-probability and value."""
    chosen = algorithm(name, credit=credit)

    def losses(logprobs, new_values, rewards, mask, passes, advantages):
        weights = chosen.token_weights(mask)
        arrays = {
            "old_logprobs": passes.old_logprobs,
            "ref_logprobs": passes.ref_logprobs,
            "advantages": advantages,
        }
        loss, _ = chosen.loss(logprobs, jnp.zeros(mask.shape), weights=weights, **arrays)
        if not chosen.needs.values:
            return loss
        returns = chosen.returns(rewards, passes, mask)
        values = {"old_values": passes.values, "returns": returns}
        return loss + chosen.value_loss(new_values, **values, weights=weights)[0]

    return jax.jit(jax.grad(losses, argnums=(0, 1)))


def trained_on(name, case, credit):
    """Advantages, and the gradient of the losses by each token's log-probability and value."""
    advantages = case.advantages(name, credit)
    old, _, values = case.passes[:3]
    rewards = case.placed if credit == "turn" else case.episodes.astype(np.float32)
    gradients = gradients_of(name, credit)(
        old + np.float32(0.1), values - np.float32(0.1), rewards, case.mask, case.passes, advantages
    )
    return [advantages, *map(np.asarray, gradients)]


# One that compares rewards alone, and those that sum over tokens or count them.
WITH_TOKENS = (
    "grpo", "distillation", "ppo", "opo", "scale_rl", "dpo", "pacs", "reinforce_plus_plus",
)  # fmt: skip


@pytest.mark.parametrize("name", slow_after(3, WITH_TOKENS))
def test_context_has_no_influence(name):
    """Credit by episode: the same without context. By turn: with one token of it."""
    case = Case(0)
    # Padding to the length of the other case: both share programs.
    for array in ("mask", "at_ends", "ends"):
        setattr(case, array, np.pad(getattr(case, array), ((0, 0), (0, LENGTH))))
    case.logprobs = np.pad(case.logprobs, ((0, 0), (0, 0), (0, LENGTH)))
    for credit, keep in (("episode", 0), ("turn", 1)):
        same = Case(0)
        same.logprobs = np.stack([moved(x, case.places, keep) for x in same.logprobs])
        for array in ("mask", "at_ends", "ends"):
            setattr(same, array, moved(getattr(same, array), case.places, keep))
        for found, without in zip(*(trained_on(name, each, credit) for each in (case, same))):
            assert np.isfinite(found).all() and not found[~case.mask].any()
            # Sums over the batch have another order.
            wanted = moved(found[:, :LENGTH], case.places, keep)
            np.testing.assert_allclose(without, wanted, rtol=1e-5, atol=1e-6)


@given(seed=seeds)
def test_the_last_turn_has_what_the_others_leave(seed):
    case = Case(seed)
    rewards = case.random.normal(size=(GROUPS, SIZE)).astype(np.float32)  # a penalty, a bonus
    found = np.asarray(placed(rewards, case.at_ends, case.mask)).reshape(case.mask.shape)
    for row, turns, given_, total in zip(found, case.places, case.rewards, rewards.ravel()):
        ends = [turn[-1] for turn in turns]
        np.testing.assert_array_equal(row[ends[:-1]], given_[:-1])
        np.testing.assert_allclose(row[ends[-1]], total - sum(given_[:-1]), rtol=1e-6, atol=1e-6)
        assert np.count_nonzero(row) <= len(ends) and not np.delete(row, ends).any()


def test_a_group_of_equal_rewards_has_no_advantage_in_any_turn():
    for name in ("grpo", "dr_grpo", "rloo", "opo", "quantile_baseline", "max_likelihood"):
        case = Case(1)
        case.rewards = [[0.0] * (len(turns) - 1) + [0.1] for turns in case.places]
        case.at_ends[:] = 0
        case.episodes[:] = 0.1
        np.testing.assert_array_equal(case.advantages(name), 0)


def test_rounding_is_no_difference_of_rewards():
    """Responses of reward 0 with many scores of steps, whose sums round differently."""
    random, length = np.random.default_rng(0), 64
    mask, steps = np.ones((8, length), bool), random.random((8, length)) < 0.5
    scores = np.where(steps, random.random(steps.shape), 0).astype(np.float32)
    zeros = np.zeros((2, 4), np.float32)
    passes = Passes(*np.zeros((2, *mask.shape), np.float32), spans=Spans(scores, steps))
    rewards = placed(zeros, scores, mask)
    for name in ("grpo", "scale_rl", "quantile_baseline", "dpo", "pacs", "noisy_rewards"):
        first = advantages_of(name, credit="turn")(rewards, mask, passes)[:, 0]
        np.testing.assert_array_equal(first, 0)
    found = advantages_of("sample_reinforcement", credit="turn")(rewards, mask, passes)
    np.testing.assert_array_equal(found[:, 0], -1)  # none is above the threshold


def test_the_baseline_of_a_turn_adds_no_bias():
    """Exact: all pairs of episodes, each with its probability.

    The policy continues with probability p, for a reward of 2, or stops, for 1. In turn 2, it gets
    3 with probability q, else -1. The mean of d log p(own choice) * A over all pairs is the
    derivative of the mean return by p, 2 + 4 q - 1 - 1. A baseline of single rewards, added up over
    turns, would favour the choice with fewer turns.
    """
    p, q = 0.3, 0.6
    # Probability, d log probability / dp of turn 1, rewards of turns.
    episodes = [
        (1 - p, -1 / (1 - p), [1.0]),
        (p * q, 1 / p, [2.0, 3.0]),
        (p * (1 - q), 1 / p, [2.0, -1.0]),
    ]
    mean = 0.0
    for pair in itertools.product(episodes, repeat=2):
        mask = np.array([[True, False, len(rewards) > 1] for _, _, rewards in pair])
        rewards = np.zeros((1, 2, 3), np.float32)
        for row, (_, _, given_) in zip(rewards[0], pair):
            row[: 2 * len(given_) : 2] = given_
        found = advantages_of("rloo", credit="turn")(rewards, mask)
        probability = pair[0][0] * pair[1][0]
        mean += probability * sum(d * float(a[0]) for (_, d, _), a in zip(pair, found)) / 2
    np.testing.assert_allclose(mean, 2 + (3 * q - (1 - q)) - 1, rtol=1e-6)


def test_by_turn_is_needed_where_asked_for():
    for name in TURNS:
        assert algorithm(name, credit="turn").needs.turn_rewards
        assert not algorithm(name).needs.turn_rewards
