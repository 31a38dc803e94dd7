"""Rules that re-weight advantages: against float64 loops, and by hand."""

import functools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax.algorithms import confidence_reweighting, error_penalty, low_confidence

seeds = st.integers(0, 2**31 - 1)
MASK = np.arange(7) < np.array([7, 1, 3, 5])[:, None]
MASK[0, 2] = False  # a hole


@functools.cache
def jitted(function, **options):
    return jax.jit(functools.partial(function, **options))


def logprobs_of(seed, mask=MASK):
    """Two arrays of log-probabilities, NaN where they do not count."""
    random = np.random.default_rng(seed)
    found = -random.exponential(size=(2, *mask.shape)).astype(np.float32)
    return np.where(mask, found, np.float32(np.nan))


def advantages_of(seed):
    random = np.random.default_rng(seed + 1)
    return np.where(MASK, random.normal(size=MASK.shape), 0).astype(np.float32)


@given(seed=seeds)
def test_confident_errors_cost_more(seed):
    (old, ref), advantages = logprobs_of(seed), advantages_of(seed)
    found, mean = jitted(error_penalty, alpha=0.7)(advantages, old, ref, MASK)
    expected, factors = advantages.astype(np.float64), []
    for i, own in enumerate(MASK):
        confidence = np.mean(old[i, own].astype(np.float64) - ref[i, own])
        for t in np.flatnonzero(own):
            if advantages[i, t] < 0:
                factors.append(1 + 0.7 * math.log1p(math.exp(confidence)))
                expected[i, t] *= factors[-1]
    # 1e-5: means of up to 6 float32 differences near 1; NaN at masked tokens would show.
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(mean, np.mean(factors) if factors else 1.0, rtol=1e-5)


def test_the_penalty_by_hand():
    """Twice as probable as under the reference, per token: softplus(log 2) = log 3."""
    mask = np.ones((2, 4), bool)
    old, ref = np.log(np.full((2, 4), 0.5)), np.log(np.full((2, 4), 0.25))
    advantages = np.repeat([[-2.0], [3.0]], 4, axis=1)
    arrays = [x.astype(np.float32) for x in (advantages, old, ref)]
    found, mean = jitted(error_penalty, alpha=0.5)(*arrays, mask)
    factor = 1 + 0.5 * math.log(3)
    np.testing.assert_allclose(found, advantages * [[factor], [1]], rtol=1e-6)
    np.testing.assert_allclose(mean, factor, rtol=1e-6)
    same, mean = jitted(error_penalty, alpha=0.0)(*arrays, mask)
    np.testing.assert_array_equal(same, advantages)
    not_negative = np.maximum(arrays[0], 0)  # 0 is no error: its factor does not count
    _, none = jitted(error_penalty, alpha=0.5)(not_negative, *arrays[1:], mask)
    assert mean == none == 1


@pytest.mark.parametrize(
    ("fraction", "length", "taken"),
    [(0.2, 5, 1), (0.2, 6, 2), (0.28, 25, 7), (0.7, 10, 7), (0.01, 30, 1), (1.0, 30, 30)],
)
def test_low_confidence_takes_the_least_probable_tokens(fraction, length, taken):
    random = np.random.default_rng(length)
    logprobs = -random.exponential(size=(1, 32))
    mask = np.arange(32)[None] < length
    dirty = np.where(mask, logprobs, -100.0).astype(np.float32)
    (found,) = jitted(low_confidence, fraction=fraction)(dirty, mask)
    expected = math.exp(np.mean(sorted(logprobs[0, :length])[:taken]))
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # a sum of 30 float32


def test_nothing_is_improbable_in_a_sequence_without_tokens():
    nothing = np.full((1, 3), np.nan, np.float32), np.zeros((1, 3), bool)
    assert jitted(low_confidence, fraction=0.2)(*nothing) == 1


@given(seed=seeds)
def test_sure_responses_lose_advantage(seed):
    (old, _), advantages = logprobs_of(seed), advantages_of(seed)
    random = np.random.default_rng(seed)
    rewards = random.choice([-1.0, 0.0, 1.0], size=(2, 2)).astype(np.float32)
    prompts = random.random(2).astype(np.float32)
    reweight = jitted(confidence_reweighting, alpha=0.3, low_fraction=0.5)
    found, mean = reweight(advantages, rewards, old, prompts, MASK)
    added = np.zeros(MASK.shape)
    for i, own in enumerate(MASK):
        group = i // 2
        if (rewards[group] > 0).any():
            logprobs = sorted(old[i, own].astype(np.float64))
            low = logprobs[: math.ceil(len(logprobs) / 2)]
            added[i, own] = 0.3 * (prompts[group] - math.exp(np.mean(low)))
    # 1e-6: differences of float32 numbers below 5.
    np.testing.assert_allclose(found, advantages + added, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mean, added.sum() / MASK.sum(), rtol=1e-4, atol=1e-6)


def test_a_solved_group_gets_a_signal_and_an_unsolved_one_none():
    """By hand: probabilities 1/2 and 1/4, prompt confidence 3/8."""
    mask = np.ones((4, 2), bool)
    old = np.log(np.repeat([[0.5], [0.25]] * 2, 2, axis=1)).astype(np.float32)
    rewards = np.array([[1, 1], [0, 0]], np.float32)
    reweight = jitted(confidence_reweighting, alpha=2.0, low_fraction=0.2)
    found, mean = reweight(
        np.zeros((4, 2), np.float32), rewards, old, np.full(2, 0.375, np.float32), mask
    )
    np.testing.assert_allclose(found, np.repeat([[-0.25], [0.25], [0], [0]], 2, axis=1), rtol=1e-6)
    np.testing.assert_allclose(mean, 0, atol=1e-7)


def test_rules_stop_the_gradient():
    old, ref = np.where(MASK, logprobs_of(0), 0)
    rewards, prompts = np.ones((2, 2), np.float32), np.full(2, 0.5, np.float32)
    penalised = jitted(error_penalty, alpha=1.0)
    reweighted = jitted(confidence_reweighting, alpha=1.0, low_fraction=0.2)

    def of(advantages, old):
        first, _ = penalised(advantages, old, ref, MASK)
        second, _ = reweighted(advantages, rewards, old, prompts, MASK)
        return (first + second).sum()

    for gradient in jax.grad(of, argnums=(0, 1))(advantages_of(0), old):
        assert not gradient.any()
