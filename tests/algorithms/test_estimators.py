"""Advantages of every built-in algorithm: against float64, and what tells neighbours apart."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.default import get_config
from semrl_jax.algorithms.algorithm import PARTS, Needs, Passes, Spans, load_algorithm
from semrl_jax.settings.rewards import MAX_SCORE
from semrl_jax.support.errors import UserError
from semrl_jax.support.modules import module_names
from tests.cases import refused
from tests.oracles import algorithms as oracle

seeds = st.integers(0, 2**31 - 1)
NAMES = module_names("semrl_jax.algorithms", PARTS)
MASK = np.arange(5) < np.array([5, 1, 3, 2, 4, 5, 2, 1])[:, None]
MASK[0, 2] = False  # a hole
LENGTHS = MASK.sum(axis=1).reshape(2, 4)


@functools.cache
def algorithm(name, **options):
    section = get_config().algorithms.to_dict()
    for section_of in (section["advantage"], section["loss"], section):
        for key in set(options) & set(section_of):
            section_of[key] = options.pop(key)
    assert not options
    return load_algorithm(section | {"name": name})


@functools.cache
def advantages_of(name, **options):
    loaded = algorithm(name, **options)

    def compute(rewards, mask=MASK, passes=None, state=None):
        return loaded.advantages(rewards, passes or Passes(), jnp.asarray(mask), state)

    return jax.jit(compute)


@functools.cache
def part_of(part, name, **options):
    """A compiled function of an algorithm."""
    return jax.jit(getattr(algorithm(name, **options), part))


def per_response(name, rewards, **options):
    """One advantage per response; fails unless all its tokens share it."""
    found = np.asarray(advantages_of(name, **options)(jnp.asarray(rewards, jnp.float32)))
    assert found.dtype == np.float32 and not found[~MASK].any()
    rows = [row[own] for row, own in zip(found, MASK)]
    assert all(np.ptp(row) == 0 for row in rows)
    return np.array([row[0] for row in rows]).reshape(2, 4)


def dr_grpo(r, lengths):
    return r - r.mean()


def rloo(r, lengths):
    return np.array([r[i] - np.mean(np.delete(r, i)) for i in range(len(r))])


def opo(r, lengths):
    return r - np.sum(lengths * r) / np.sum(lengths)


def quantile_baseline(r, lengths, quantile=0.5):
    baseline = min(x for x in r if np.mean(r <= x) >= quantile)
    return (r - baseline) / (r.std(ddof=1) + 1e-6)


def max_likelihood(r, lengths):
    return (r - r.mean()) / r.mean() if r.mean() > 0 else 0 * r


def sample_reinforcement(r, lengths):
    return np.where(r > 0, 0.1, -1.0)


def asymre(r, lengths):
    return r - (r.mean() - 0.1)


def noisy_rewards(r, lengths, fp=0.0, fn=0.0):
    return rloo(((r > 0) - fp) / (1 - fp - fn), lengths)


def red_drop(r, lengths):
    wrong = [i for i, x in enumerate(r) if x < r.mean()]
    kept = [i for i in range(len(r)) if i not in wrong[len(r) - len(wrong) :]]
    return np.array([r[i] - np.mean(r[kept]) if i in kept else 0 for i in range(len(r))])


def red_weight(r, lengths):
    a = r - r.mean()
    return a * np.exp(a / 1.0)


ORACLES = (
    dr_grpo, rloo, opo, quantile_baseline, max_likelihood, sample_reinforcement, asymre,
    noisy_rewards, red_drop, red_weight,
)  # fmt: skip


@pytest.mark.parametrize("expected", ORACLES, ids=lambda function: function.__name__)
@given(seed=seeds)
def test_advantages_match_float64(expected, seed):
    rng = np.random.default_rng(seed)
    rewards = rng.choice([0.0, 0.5, 1.0], size=(2, 4))
    wanted = [expected(r, lengths) for r, lengths in zip(rewards, LENGTHS)]
    # 1e-6: sums of four float32 numbers near 1.
    found = per_response(expected.__name__, rewards)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_every_algorithm_has_an_oracle():
    others = {"capo", "prof"}  # tests/algorithms/test_steps.py
    others |= {"distillation", "dpo", "grpo", "pacs", "ppo", "reinforce", "reinforce_plus_plus"}
    others |= {"scale_rl", "single_stream", "smooth_standardisation"}
    assert {f.__name__ for f in ORACLES} | others == set(NAMES)


@pytest.mark.parametrize(
    "name",
    [
        "dr_grpo", "rloo", "opo", "quantile_baseline", "max_likelihood", "noisy_rewards",
        "red_drop", "red_weight", "scale_rl",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [0.1, 0.7, 1.0])
def test_equal_rewards_have_no_advantage(name, value):
    np.testing.assert_array_equal(per_response(name, np.full((2, 4), value)), 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_rewards_have_finite_advantages(name):
    largest = np.where(np.arange(8).reshape(2, 4) % 3, -MAX_SCORE, MAX_SCORE).astype(np.float32)
    state = algorithm(name).first_state(num_prompts=2) or None
    zeros = np.zeros(MASK.shape, np.float32)
    spans = Spans(np.where(MASK, largest.reshape(-1, 1), zeros), MASK)
    passes = Passes(zeros, zeros, zeros, spans, largest > -1)
    found = advantages_of(name)(largest, passes=passes, state=state)
    assert np.isfinite(np.square(found)).all()


@pytest.mark.parametrize(("quantile", "correct", "sign"), [(0.4, 2, 1), (0.4, 3, -1), (0.6, 1, 1)])
def test_a_quantile_keeps_one_side_of_a_group(quantile, correct, sign):
    """arXiv:2509.22611: the correct responses for p <= 1 - quantile, the wrong ones above it."""
    rewards = np.tile(np.arange(4) < correct, (2, 1)).astype(float)
    found = per_response("quantile_baseline", rewards, quantile=quantile)
    assert (np.sign(found) == np.where(rewards == (sign > 0), sign, 0)).all()


@given(seed=seeds)
def test_scale_rl_is_a_mean_over_the_groups_that_differ(seed):
    """Advantages times the weights of `token_mean` are those of a mean over prompts."""
    rewards = np.random.default_rng(seed).choice([0.0, 0.5, 1.0], size=(2, 4))
    rewards[1] = 1.0 if seed % 2 else rewards[1]
    differ = [p for p in range(2) if np.ptp(rewards[p]) > 0]
    a = [rewards[p] - rewards[p].mean() for p in differ]
    std = np.sqrt(np.sum(np.square(a)) / max(4 * len(a), 1)) + 1e-6
    wanted = np.zeros((2, 4))
    for p, row in zip(differ, a):
        wanted[p] = row / std / len(differ) / LENGTHS[p].sum()
    found = per_response("scale_rl", rewards) / MASK.sum()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("p", [0.1, 0.6])
def test_max_likelihood_has_the_first_terms_of_the_log_likelihood(p):
    """The mean over all groups of 4 is the sum of (1 / k) d pass@k / dp for k = 1, 2, 3."""
    groups = np.array(list(itertools.product([0, 1], repeat=4)), np.float32)
    found = np.asarray(
        algorithm("max_likelihood").advantages(groups, Passes(), np.ones((64, 1), bool))
    )
    scores = np.where(groups > 0, 1 / p, -1 / (1 - p))  # d log probability / dp
    probability = np.prod(np.where(groups > 0, p, 1 - p), axis=1)
    mean = np.sum(probability * np.mean(found.reshape(-1, 4) * scores, axis=1))
    np.testing.assert_allclose(mean, sum((1 - p) ** (k - 1) for k in (1, 2, 3)), rtol=1e-6)


def test_the_median_baseline_without_deviation():
    rewards = np.array([[0.0, 0.5, 1.0, 1.0]] * 2)
    found = per_response("quantile_baseline", rewards, normalise=False)
    np.testing.assert_array_equal(found, rewards - 0.5)


@pytest.mark.parametrize("size", [25, 50])
def test_the_place_of_a_quantile_does_not_round_up(size):
    """0.28 * 25 is 7.000000000000001 in float64."""
    rewards, mask = np.arange(size, dtype=np.float32)[None], np.ones((size, 1), bool)
    found = advantages_of("quantile_baseline", quantile=0.28, normalise=False)(rewards, mask)
    assert np.flatnonzero(found == 0) == [0.28 * size // 1 - 1]


def test_only_max_likelihood_has_no_use_for_negative_rewards():
    """Rewards of responses come first, then the rewards of the turns of each response."""
    for name in NAMES:
        algorithm(name).check_rewards(np.zeros((2, 4)), (np.ones(2), np.zeros(0)))
        if name != "max_likelihood":
            algorithm(name).check_rewards(np.full((2, 4), -1.0), (np.ones(2),))
    message = "response or turn has the reward -0.5, but algorithms.name='max_likelihood' is for"
    for rewards in ([np.array([[1.0, -0.5]])], [np.ones((1, 2)), [np.array([1.0, -0.5])]]):
        refused(message, algorithm("max_likelihood").check_rewards, *rewards)


@pytest.mark.parametrize(
    ("weights", "expected"), [((1.0, 0.0), [1, 0]), ((0.0, 1.0), [0, -1]), ((0.1, 1.0), [0.1, -1])]
)
def test_positive_and_negative_samples(weights, expected):
    rewards = np.array([[1.0, -0.5, 1, -1], [1, -1, 1, 0]])
    options = dict(zip(("positive_weight", "negative_weight"), weights))
    found = per_response("sample_reinforcement", rewards, **options)
    np.testing.assert_allclose(found, np.where(rewards > 0, *expected), rtol=1e-6)


def test_a_negative_shift_favours_correct_responses():
    rewards = np.array([[1.0, 0, 1, 0]] * 2)
    found = per_response("asymre", rewards, baseline_shift=-0.2)
    np.testing.assert_allclose(found, np.where(rewards > 0, 0.7, -0.3), rtol=1e-6)


@pytest.mark.parametrize("rates", [(0.1, 0.2), (0.0, 0.4), (0.3, 0.0)])
def test_noisy_rewards_have_the_mean_of_the_true_ones(rates):
    """Exact: all 16 verdicts on a group, each with its probability given the true rewards."""
    fp, fn = rates
    truth = np.array([1, 0, 0, 1])
    accepts = np.where(truth == 1, 1 - fn, fp)
    options = {"false_positive_rate": fp, "false_negative_rate": fn}
    means = {"backward": np.zeros(4), "forward": np.zeros(4)}
    for verdicts in itertools.product((0.0, 1.0), repeat=4):
        probability = np.where(np.array(verdicts) == 1, accepts, 1 - accepts).prod()
        rows = np.array([verdicts] * 2)
        backward = per_response("noisy_rewards", rows, **options)
        means["backward"] += probability * backward[0]
        wanted = noisy_rewards(rows[0], None, fp, fn)
        # 1e-6: sums of four float32 numbers near 1.
        np.testing.assert_allclose(backward[1], wanted, rtol=1e-5, atol=1e-6)
        forward = per_response("noisy_rewards", rows, correction="forward", false_negative_rate=fn)
        means["forward"] += probability * forward[0]
    np.testing.assert_allclose(means["backward"], rloo(truth, None), atol=1e-6)
    np.testing.assert_allclose(means["forward"], (1 - fp - fn) * (truth - 1), atol=1e-6)


def test_a_reward_is_accepted_above_the_threshold():
    rewards = np.array([[1.0, 0.5, 0, -1]] * 2)
    for threshold, accepted in ((0.0, [1, 1, 0, 0]), (0.5, [1, 0, 0, 0]), (-1.0, [1, 1, 1, 0])):
        found = per_response(
            "noisy_rewards", rewards, threshold=threshold, correction="forward",
            false_negative_rate=0.25,
        )  # fmt: skip
        np.testing.assert_array_equal(found, np.array([accepted] * 2) - 0.75)


def drawn(seed, count=2, least=-1.0):
    """Random rewards; `count` arrays of tokens, and passes of these with NaN at the padding."""
    rng = np.random.default_rng(seed)
    rewards = rng.choice([least, 0.5, 1.0], size=(2, 4)).astype(np.float32)
    arrays = rng.normal(size=(count, *MASK.shape)).astype(np.float32)
    return rewards, arrays, Passes(*(np.where(MASK, x, np.float32(np.nan)) for x in arrays))


def reinforce_plus_plus(rewards, old, ref, *, coefficient, group_baseline):
    rewards = np.asarray(rewards, np.float64)
    if group_baseline:
        rewards = rewards - rewards.mean(axis=1, keepdims=True)
    returns = np.zeros(MASK.shape)
    for i, (row, reward) in enumerate(zip(MASK, rewards.reshape(-1))):
        later = reward
        for t in reversed(np.flatnonzero(row)):
            later -= coefficient * (float(old[i, t]) - float(ref[i, t]))
            returns[i, t] = later
    return oracle.whiten(returns, MASK)


@pytest.mark.parametrize("group_baseline", [False, True])
@given(seed=seeds)
def test_reinforce_plus_plus_matches_loops(group_baseline, seed):
    rewards, (old, ref), passes = drawn(seed)
    options = {"group_baseline": group_baseline, "kl_reward_coefficient": 0.3}
    compute = advantages_of("reinforce_plus_plus", kl_coefficient=0.0, **options)
    found = compute(rewards, passes=passes)
    expected = reinforce_plus_plus(
        rewards, old, ref, coefficient=0.3, group_baseline=group_baseline
    )
    # 1e-5: the differences of float32 sums over five tokens, divided by a deviation near 1.
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def token_rewards(rewards, old, ref, coefficient):
    """In float64: the reward at the last token, less coefficient * (old - ref) at every token."""
    found = np.zeros(MASK.shape)
    for i, (row, reward) in enumerate(zip(MASK, np.ravel(rewards))):
        own = np.flatnonzero(row)
        found[i, own] = -coefficient * (old[i, own].astype(float) - ref[i, own])
        found[i, own[-1]] += reward
    return found


@pytest.mark.parametrize("gamma, gae_lambda", [(1.0, 1.0), (0.9, 0.5)])
@given(seed=seeds)
def test_ppo_matches_loops(gamma, gae_lambda, seed):
    rewards, (old, ref, values), passes = drawn(seed, count=3)
    estimates, returns = oracle.generalized(
        token_rewards(rewards, old, ref, 0.3), values, MASK, gamma, gae_lambda
    )
    options = {"gamma": gamma, "gae_lambda": gae_lambda, "kl_reward_coefficient": 0.3}
    found = advantages_of("ppo", kl_coefficient=0.0, **options)(rewards, passes=passes)
    # 1e-5: as above.
    np.testing.assert_allclose(found, oracle.whiten(estimates, MASK), rtol=1e-4, atol=1e-5)
    found = part_of("returns", "ppo", kl_coefficient=0.0, **options)(rewards, passes, MASK)
    np.testing.assert_allclose(found, returns, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
@given(seed=seeds)
def test_distillation_matches_loops(discount, seed):
    rewards, (old, ref), passes = drawn(seed, least=0.0)
    expected = np.zeros(MASK.shape)
    for i, row in enumerate(MASK):
        later = 0.0
        for t in reversed(np.flatnonzero(row)):
            later = float(ref[i, t]) - float(old[i, t]) + discount * later
            expected[i, t] = 0.7 * later
    options = {"teacher_weight": 0.7, "teacher_discount": discount}
    found = advantages_of("distillation", **options)(rewards, passes=passes)
    # 1e-5: float32 sums over five tokens.
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    mixed = advantages_of("distillation", reward_weight=2.0, **options)(rewards, passes=passes)
    of_rewards = advantages_of("grpo")(rewards)
    np.testing.assert_allclose(mixed, expected + 2.0 * of_rewards, rtol=1e-4, atol=1e-5)


def dpo(implicit, rewards, beta):
    """The sum over the groups of L."""
    total = 0.0
    for s, r in zip(implicit, rewards):
        if r.max() > r.min():
            total -= jax.nn.log_sigmoid(beta * (s[np.argmax(r)] - s[np.argmin(r)]))
    return total


def pacs(implicit, rewards, beta):
    total = 0.0
    for s, r in zip(implicit, rewards):
        labels = r > 0
        counts = {label: np.sum(labels == label) for label in labels}
        for i, label in enumerate(labels):
            psi = beta * (s[i] - (jnp.sum(s) - s[i]) / (len(r) - 1))
            weight = len(r) / (2 * counts[label]) if len(counts) == 2 else 1.0
            total -= weight * jax.nn.log_sigmoid(psi if label else -psi)
    return total


@pytest.mark.parametrize("expected", [dpo, pacs], ids=["dpo", "pacs"])
@given(seed=seeds)
def test_advantages_are_the_gradient_of_a_loss_of_implicit_rewards(expected, seed):
    """Automatic differentiation of the paper's loss gives them."""
    rewards, (old, ref), passes = drawn(seed, least=0.0)
    implicit = np.where(MASK, old - ref, 0).sum(axis=1).reshape(2, 4)
    gradient = jax.grad(expected)(jnp.asarray(implicit), rewards, 0.7)
    found = advantages_of(expected.__name__, reward_beta=0.7)(rewards, passes=passes)
    # 1e-5: float32 sums of four numbers near 1.
    wanted = -np.where(MASK, np.asarray(gradient).reshape(-1, 1), 0)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_teacher_counts_once():
    options = {"kl_estimator": "exact", "kl_coefficient": 1.0}
    needs = algorithm("distillation", teacher_weight=0.0, **options).needs
    assert needs.exact_kl and needs.reference
    assert not (needs.early_reference or needs.early_old_logprobs or needs.groups)
    with pytest.raises(UserError, match=r"advantage.teacher_weight=1.0 must be 0 with kl_estim"):
        algorithm("distillation", **options)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo"])
@given(seed=seeds)
def test_groups_compare_rewards_less_their_kl(name, seed):
    rewards, (old, ref), passes = drawn(seed)
    left = token_rewards(rewards, old, ref, 0.3).sum(axis=1).reshape(2, 4)
    compute = advantages_of(name, kl_coefficient=0.0, kl_reward_coefficient=0.3)
    found = compute(rewards, passes=passes)
    # 1e-5: float32 sums over five tokens; GRPO divides by a deviation near 1.
    np.testing.assert_allclose(found, advantages_of(name)(left), rtol=1e-4, atol=1e-5)


def test_turns_compare_returns_less_their_kl():
    rng = np.random.default_rng(0)
    old, ref = rng.normal(size=(2, *MASK.shape)).astype(np.float32)
    rewards = token_rewards(rng.normal(size=(2, 4)), old, ref, 0.0).reshape(2, 4, -1)
    options = {"kl_coefficient": 0.0, "credit": "turn"}
    found = advantages_of("dr_grpo", kl_reward_coefficient=0.3, **options)(
        np.float32(rewards), passes=Passes(old, ref)
    )
    left = rewards + token_rewards(np.zeros((2, 4)), old, ref, 0.3).reshape(2, 4, -1)
    expected = advantages_of("dr_grpo", **options)(np.float32(left))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_group_may_have_an_adaptive_coefficient():
    options = {"kl_coefficient": 0.0, "kl_reward_coefficient": 0.5, "kl_target": 0.1}
    old, ref = np.zeros(MASK.shape, np.float32), np.full(MASK.shape, -1.0, np.float32)
    rewards = np.zeros((2, 4), np.float32)
    found = advantages_of("dr_grpo", **options)(
        rewards, passes=Passes(old, ref), state={"kl_coefficient": np.float32(0.25)}
    )
    left = -0.25 * LENGTHS.astype(np.float32)
    np.testing.assert_allclose(found, advantages_of("dr_grpo")(left), rtol=1e-5, atol=1e-6)


def test_an_adaptive_coefficient_moves_towards_its_target():
    """KL 0.5, targets 0.1 and 1.0: 8 responses of a horizon of 16 change it by +-20 % * 8 / 16."""
    old, ref = np.full(MASK.shape, -1.0, np.float32), np.full(MASK.shape, -1.5, np.float32)
    rewards = np.zeros((2, 4), np.float32)
    options = {"kl_coefficient": 0.0, "kl_reward_coefficient": 0.3, "kl_horizon": 16}
    for target, factor in ((0.1, 1.1), (1.0, 0.9)):
        options["kl_target"] = target
        adaptive = algorithm("ppo", **options)
        state = adaptive.first_state()
        assert adaptive.needs.state and state == {"kl_coefficient": np.float32(0.3)}
        passes = Passes(old, ref, np.zeros(MASK.shape, np.float32))
        after = part_of("next_state", "ppo", **options)(state, rewards, passes, MASK)
        np.testing.assert_allclose(after["kl_coefficient"], 0.3 * factor, rtol=1e-6)
        returns = part_of("returns", "ppo", **options)(rewards, passes, MASK, after)
        # The first token's return is that of its whole response.
        np.testing.assert_allclose(
            returns[:, 0], -0.3 * factor * 0.5 * LENGTHS.ravel(), rtol=1e-5, atol=1e-6
        )


def test_a_horizon_below_the_batch_changes_the_coefficient_by_a_fifth():
    options = {"kl_coefficient": 0.0, "kl_reward_coefficient": 0.5, "kl_target": 0.1}
    old, ref = np.zeros(MASK.shape, np.float32), np.full(MASK.shape, -9.0, np.float32)
    state = {"kl_coefficient": np.float32(0.5)}
    next_state = part_of("next_state", "reinforce_plus_plus", kl_horizon=3, **options)
    after = next_state(state, np.zeros((2, 4), np.float32), Passes(old, ref), MASK)
    np.testing.assert_allclose(after["kl_coefficient"], 0.6, rtol=1e-6)


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_the_running_baseline_is_the_weighted_mean_of_earlier_steps(rate):
    rng = np.random.default_rng(0)
    state, means = algorithm("reinforce", baseline_rate=rate).first_state(), []
    for _ in range(4):
        rewards = rng.normal(size=(8, 1)).astype(np.float32)
        weights = (1 - rate) ** np.arange(len(means))
        baseline = np.average(means[::-1], weights=weights) if means else 0.0
        found = advantages_of("reinforce", baseline_rate=rate)(rewards, state=state)
        wanted = np.where(MASK, rewards - baseline, 0)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        next_state = part_of("next_state", "reinforce", baseline_rate=rate)
        state = next_state(state, rewards, Passes(), MASK)
        means.append(float(rewards.mean()))


def test_smooth_standardisation_matches_the_statistics_of_all_visits():
    """arXiv:2509.02333: over all responses to a prompt so far, in the weights of its code."""
    rng = np.random.default_rng(0)
    name, visits = "smooth_standardisation", []
    state = algorithm(name).first_state(num_prompts=2)
    for step in range(5):
        rewards = rng.choice([0.0, 0.3, 1.0], size=(2, 4))
        rewards[:, 1:] = rewards[:, :1] if step == 3 else rewards[:, 1:]  # two equal groups
        visits.append(rewards)
        i = len(visits)
        found = np.asarray(advantages_of(name)(np.float32(rewards), state=state))
        for p in range(2):
            groups = np.array(visits)[:, p]
            variance = groups.var(axis=1, ddof=1).mean() + groups.mean(axis=1).var()
            a = (rewards[p] - rewards[p].mean()) / (rewards[p].std(ddof=1) + 1e-6)
            b = (rewards[p] - groups.mean()) / (np.sqrt(variance) + 1e-6)
            pair = np.array([((i - 1) * a + b) / i, (a + (i - 1) * b) / i])
            wanted = np.take_along_axis(pair, np.abs(pair).argmin(axis=0)[None], axis=0)[0]
            if step == 3:
                np.testing.assert_allclose(wanted, b / i, rtol=1e-6)
            rows = found[4 * p : 4 * p + 4]
            np.testing.assert_allclose(
                rows, np.where(MASK[4 * p : 4 * p + 4], wanted[:, None], 0), rtol=1e-4, atol=1e-5
            )
        state = part_of("next_state", name)(state, np.float32(rewards), Passes(), MASK)


def test_equal_rewards_of_all_visits_have_no_smooth_advantage():
    state = algorithm("smooth_standardisation").first_state(num_prompts=2)
    rewards = np.full((2, 4), 0.7, np.float32)
    for _ in range(3):
        found = advantages_of("smooth_standardisation")(rewards, state=state)
        np.testing.assert_array_equal(found, 0.0)
        state = part_of("next_state", "smooth_standardisation")(state, rewards, Passes(), MASK)


def test_a_single_stream_has_the_baseline_of_each_prompt():
    rng = np.random.default_rng(0)
    kept, name = 0.75, "single_stream"
    state = algorithm(name, prompt_memory=kept).first_state(num_prompts=8)
    sums, weights = np.zeros(8), np.zeros(8)
    for step in range(4):
        rewards = rng.choice([0.0, 1.0], size=(8, 1))
        v = np.where(weights > 0, sums / np.maximum(weights, 1), rewards.mean())
        a = np.repeat(rewards[:, 0] - v, 5).reshape(8, 5)
        wanted = np.where(MASK, (a - a[MASK].mean()) / np.sqrt(a[MASK].var(ddof=1) + 1e-8), 0)
        found = advantages_of(name, prompt_memory=kept)(np.float32(rewards), state=state)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        factor = 4.0 if step == 0 else 1.0  # the first visit: 1 / (1 - 0.75)
        sums, weights = kept * sums + factor * rewards[:, 0], kept * weights + factor
        after = part_of("next_state", name, prompt_memory=kept)
        state = after(state, np.float32(rewards), Passes(), MASK)
    np.testing.assert_allclose(state["weights"], weights, rtol=1e-6)


def test_needs_follow_the_options():
    wanted = functools.partial(Needs, given=True)  # every loss tells given responses
    assert algorithm("single_stream", surrogate="reinforce", kl_coefficient=0.0).needs == wanted(
        prompt_state=True
    )
    assert algorithm("smooth_standardisation").needs.groups
    assert algorithm("grpo").needs == wanted(True, True, True)
    whole = algorithm("rloo", surrogate="gspo", kl_coefficient=0.0).needs
    assert whole == wanted(groups=True, old_logprobs=True, sequence_ids=True)
    free = algorithm("asymre", surrogate="reinforce", kl_coefficient=0.0)
    assert free.needs == wanted(groups=True)
    assert not algorithm("sample_reinforcement").needs.groups
    assert not algorithm("reinforce_plus_plus").needs.groups
    assert algorithm("noisy_rewards").needs.groups
    assert not algorithm("noisy_rewards", correction="forward").needs.groups
    assert algorithm("reinforce_plus_plus", group_baseline=True).needs.groups
    kl = algorithm(
        "reinforce_plus_plus",
        kl_reward_coefficient=0.1, kl_coefficient=0.0, surrogate="reinforce",
    )  # fmt: skip
    assert kl.needs == wanted(
        old_logprobs=True, reference=True, early_old_logprobs=True, early_reference=True
    )
    own = algorithm("distillation", teacher="policy", kl_coefficient=0.0).needs
    assert own == wanted(old_logprobs=True, early_old_logprobs=True, own_teacher=True)
    critic = algorithm("ppo", kl_coefficient=0.0)
    assert critic.needs == wanted(old_logprobs=True, values=True)
    assert algorithm("reinforce").needs == wanted(old_logprobs=True, reference=True, state=True)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {"clip_epsilon": 1.5}, r"loss.clip_epsilon=1.5 must be in \(0, 1\]"),
        (
            "grpo",
            {"clip_epsilon_high": 0.1},
            "loss.clip_epsilon_high=0.1 must be at least clip_eps",
        ),
        ("grpo", {"dual_clip": 0.5}, "loss.dual_clip=0.5 must be above 1, or 0"),
        ("grpo", {"opmd_tau": 0.0}, "loss.opmd_tau=0.0 must be above 0"),
        ("grpo", {"surrogate": "ppo"}, "loss.surrogate='ppo' must be one of clip, gspo"),
        ("grpo", {"kl_coefficient": -1.0}, "loss.kl_coefficient=-1.0 must be at least 0"),
        ("grpo", {"kl_estimator": "full"}, "loss.kl_estimator='full' must be one of 'kl', 'abs'"),
        ("dr_grpo", {"aggregation": "constant_length"}, "constant_length=0 must be the limit"),
        ("dr_grpo", {"constant_length": 5}, "constant_length=5 must be the limit.* and 0 with any"),
        ("quantile_baseline", {"quantile": 1.0}, r"advantage.quantile=1.0 must be in \(0, 1\)"),
        (
            "sample_reinforcement",
            {"negative_weight": -1.0},
            "advantage.negative_weight=-1.0 must be",
        ),
        ("noisy_rewards", {"correction": "none"}, "advantage.correction='none' must be one of 'ba"),
        (
            "noisy_rewards",
            {"correction": "forward", "false_positive_rate": 0.1},
            r"advantage.false_positive_rate=0.1 must be in \[0, 1\), and 0 with correction='forw",
        ),
        (
            "noisy_rewards",
            {"false_positive_rate": 0.4, "false_negative_rate": 0.6},
            "advantage.false_negative_rate=0.6 must be at least 0 and below 0.6, which is 1 - f",
        ),
        (
            "reinforce_plus_plus",
            {"kl_reward_coefficient": 0.1},
            r"loss.kl_coefficient=0.001 must be 0 with kl_reward_coefficient=0.1: the KL .* twice",
        ),
        (
            "grpo",
            {"quantile": 0.3},
            "advantage.quantile=0.3 is no option of algorithms.name='grpo'",
        ),
        ("distillation", {"teacher": "policy"}, "loss.kl_coefficient=0.001 must be 0 with teach"),
        ("red_weight", {"weight_temperature": 0.0}, "advantage.weight_temperature=0.0 must be ab"),
        ("grpo", {"rec_range": "both"}, "loss.rec_range='both' must be one of 'one_side', 'two"),
        ("ppo", {"value_clip": 0.0}, "loss.value_clip=0.0 must be above 0"),
        ("ppo", {"gae_lambda": 1.5}, r"advantage.gae_lambda=1.5 must be in \[0, 1\]"),
        ("ppo", {"kl_target": 0.1}, "advantage.kl_target=0.1 must .* there is nothing to adapt"),
        ("reinforce", {"baseline_rate": 1.0}, r"advantage.baseline_rate=1.0 must be in \[0, 1\)"),
        ("gae", {}, "name='gae' is unknown; choose one of asymre, capo, distillation"),
    ],
)
def test_wrong_options_are_refused_in_one_line(name, options, message):
    refused(f"algorithms.{message}", algorithm, name, **options)


def test_cispo_may_have_an_upper_bound_alone():
    """arXiv:2506.13585 has no lower bound, which is clip_epsilon=1."""
    found = algorithm("grpo", surrogate="cispo", clip_epsilon=1.0, clip_epsilon_high=0.3)
    assert found.options.high == 0.3


def test_the_defaults_of_the_config_are_those_of_the_options():
    section = get_config().algorithms.to_dict()
    fields = {**section["advantage"], **section["loss"]}
    fields |= {key: section[key] for key in ("aggregation", "constant_length")}
    known = {}
    for name in NAMES:
        known |= vars(algorithm(name).module.Options())
    assert known == fields
