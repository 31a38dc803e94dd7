"""Truncated importance sampling: the weights, and the loss that they make."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax import algorithms
from tests.cases import raised
from tests.oracles import algorithms as oracle

seeds = st.integers(0, 2**31 - 1)
LEVELS = ("token", "sequence")  # those with weights
levels = st.sampled_from(LEVELS)
MASKS = (  # level, floor, cap
    ("token", 0.5, 2.0),  # IcePop
    ("sequence", 0.2, 5.0),
    ("geometric", 0.8, 1.25),
    ("total_variation", 0.0, 0.2),
)
MASK = np.arange(6) < np.array([6, 1, 4, 0])[:, None]
MASK[0, 2] = False  # a hole


@functools.cache
def weights_at(level, cap=2.0, outside="truncate", floor=0.0):
    options = {"level": level, "cap": cap, "outside": outside, "floor": floor}
    return jax.jit(functools.partial(algorithms.importance_weights, **options))


def logprobs_of(seed, spread=0.8, mask=MASK):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=mask.shape)
    return old.astype(np.float32), (old + spread * rng.normal(size=mask.shape)).astype(np.float32)


@pytest.mark.parametrize(
    ("level", "outside", "floor", "cap"),
    [
        *((level, "truncate", 0.0, cap) for level in LEVELS for cap in (1.0, 2.0, 10.0)),
        *((level, "mask", floor, cap) for level, floor, cap in MASKS),
    ],
)
@given(seed=seeds)
def test_weights_match_float64_loops(level, outside, floor, cap, seed):
    arrays = logprobs_of(seed)
    compute = weights_at(level, cap, outside, floor)
    weights, share = compute(*arrays, MASK)
    expected, expected_share = oracle.importance_weights(*arrays, MASK, level, cap, floor, outside)
    # A sum of six float32 terms near 1, then its exponential.
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    np.testing.assert_allclose(share, expected_share, rtol=1e-6)
    assert weights.dtype == np.float32
    # Masked-out tokens change nothing.
    for hostile in (np.nan, np.inf, -np.inf, 1e4):
        dirty = [np.where(MASK, x, np.float32(hostile)) for x in arrays]
        for a, b in zip(compute(*dirty, MASK), (weights, share)):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("level", LEVELS)
def test_weighted_means_under_the_engine_are_means_under_the_policy(level):
    """The mean of w f under the engine is the mean of f under the policy, over all responses of two
    tokens. By token this holds for f of the last token, given the tokens before it."""
    rng = np.random.default_rng(0)
    tokens = np.array([(a, b) for a in range(3) for b in range(3)])

    def random_policy():
        first, second = rng.dirichlet(np.ones(3) * 3), rng.dirichlet(np.ones(3) * 3, size=3)
        return np.stack([first[tokens[:, 0]], second[tokens[:, 0], tokens[:, 1]]], axis=1)

    policy, engine = random_policy(), random_policy()
    old, rollout = (np.log(p).astype(np.float32) for p in (policy, engine))
    weights, share = weights_at(level, 1e6)(old, rollout, np.ones((9, 2), bool))
    assert share == 0
    f = rng.normal(size=9)
    of_engine = engine.prod(axis=1) * weights[:, 1]
    of_policy = {"sequence": policy.prod(axis=1), "token": engine[:, 0] * policy[:, 1]}[level]
    np.testing.assert_allclose(np.sum(of_engine * f), np.sum(of_policy * f), rtol=1e-5)


@given(seed=seeds, level=levels)
def test_weights_are_one_if_engine_and_policy_agree(seed, level):
    old, _ = logprobs_of(seed)
    weights, share = weights_at(level)(old, old, MASK)
    np.testing.assert_array_equal(weights, np.ones(MASK.shape))
    assert share == 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gap", [-1e30, -200.0, 200.0, 1e30])
def test_far_apart_policies_stay_finite(level, gap):
    old, _ = logprobs_of(0)
    weights, _ = weights_at(level, 1e6)(old + np.float32(gap), old, MASK)
    expected = 1e6 if gap > 0 else np.exp(-20.0)
    np.testing.assert_allclose(np.asarray(weights)[MASK], expected, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_a_logprob_that_is_not_finite_makes_its_weights_nan(bad, which):
    arrays = logprobs_of(0)
    arrays[which][2, 1] = bad
    weights, _ = weights_at("token")(*arrays, MASK)
    assert np.argwhere(np.isnan(weights)).tolist() == [[2, 1]]
    weights, _ = weights_at("sequence")(*arrays, MASK)
    assert np.argwhere(np.isnan(weights)).tolist() == [[2, t] for t in range(4)]


@pytest.mark.parametrize("level", LEVELS)
def test_loss_and_gradient_match_torch(level):
    """Weights on the advantages give the loss of torch, where they multiply the maximum."""
    old, rollout = logprobs_of(3)
    rng = np.random.default_rng(4)
    logprobs = (old + 0.4 * rng.normal(size=MASK.shape)).astype(np.float32)
    advantages, entropy = rng.normal(size=(2, *MASK.shape)).astype(np.float32)
    token_weights = algorithms.token_weights(jnp.asarray(MASK))

    def loss_of(logprobs, entropy, old, rollout):
        weights, _ = algorithms.importance_weights(old, rollout, jnp.asarray(MASK), level=level)
        loss, report = algorithms.policy_loss(
            logprobs, entropy, old_logprobs=old, ref_logprobs=rollout,
            advantages=advantages * weights, weights=token_weights,
        )  # fmt: skip
        return loss, report

    (loss, report), gradients = jax.jit(
        jax.value_and_grad(loss_of, argnums=(0, 1, 2, 3), has_aux=True)
    )(logprobs, entropy, old, rollout)

    x, h = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (logprobs, entropy))
    mu, reference = (torch.tensor(a, dtype=torch.float64) for a in (old, rollout))
    mask, advantage = torch.tensor(MASK), torch.tensor(advantages, dtype=torch.float64)
    difference = torch.where(mask, mu - reference, 0.0)
    if level == "sequence":
        difference = difference.sum(dim=1, keepdim=True).expand(MASK.shape)
    tis = torch.exp(difference).clamp(max=2.0)
    ratio = torch.exp(x - mu)
    surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    kl = torch.exp(reference - x) + x - reference - 1
    scale = torch.tensor(np.asarray(token_weights), dtype=torch.float64)
    pg_loss = (tis * surrogate * scale).sum()
    expected = pg_loss + ((0.001 * kl - 0.001 * h) * scale).sum()
    expected.backward()
    # 1e-5 and 1e-7: eleven float32 terms near 1, weighted by 1/11.
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(report["policy/pg_loss"], pg_loss.item(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(gradients[0], x.grad.numpy(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(gradients[1], h.grad.numpy(), rtol=1e-5, atol=1e-7)
    for gradient in gradients[2:]:  # no gradient through weights or old log-probabilities
        np.testing.assert_array_equal(gradient, 0)


def test_masks_by_hand():
    # Ratios 1/2, 4, 1; their product 2, their geometric mean 1.26; differences of probabilities
    # 0.25, 0.6 and 0.
    old, rollout = (
        np.log(np.array([[0.25, 0.8, 0.5, 0.9]], np.float32)),
        np.log(np.array([[0.5, 0.2, 0.5, 0.1]], np.float32)),
    )
    mask = np.array([[True, True, True, False]])
    for (level, floor, cap), expected in (
        (("token", 0.5, 2.0), [0.5, 0.0, 1.0, 1.0]),  # the bounds are inside
        (("token", 0.6, 5.0), [0.0, 4.0, 1.0, 1.0]),
        (("sequence", 0.0, 1.9), [0.0, 0.0, 0.0, 1.0]),
        (("sequence", 0.0, 2.1), [2.0, 2.0, 2.0, 1.0]),
        (("geometric", 0.9, 1.25), [0.0, 0.0, 0.0, 1.0]),
        (("geometric", 0.9, 1.27), [1.0, 1.0, 1.0, 1.0]),  # no importance weight
        (("total_variation", 0.0, 0.3), [1.0, 0.0, 1.0, 1.0]),
    ):
        weights, share = weights_at(level, cap, "mask", floor)(old, rollout, mask)
        np.testing.assert_allclose(weights, [expected], rtol=1e-5)
        np.testing.assert_allclose(share, np.mean(np.array(expected[:3]) == 0), rtol=1e-6)
    floored, share = weights_at("token", floor=0.75)(old, rollout, mask)
    np.testing.assert_allclose(floored, [[0.75, 2.0, 1.0, 1.0]], rtol=1e-6)
    np.testing.assert_allclose(share, 2 / 3, rtol=1e-6)


@pytest.mark.parametrize(("level", "floor", "cap"), MASKS)
def test_a_logprob_that_is_not_finite_is_not_masked_away(level, floor, cap):
    arrays = logprobs_of(0)
    arrays[0][0, 1] = np.nan
    assert np.isnan(weights_at(level, cap, "mask", floor)(*arrays, MASK)[0][0, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "none"}, "level='none' must be one of token, sequence, geometric"),
        ({"level": "token", "cap": 0.5}, "cap=0.5 must be at least 1"),
        ({"level": "token", "cap": float("nan")}, "cap=nan must be at least 1"),
        ({"level": "token", "floor": 1.5}, r"floor=1.5 must be in \[0, 1\]"),
        ({"level": "token", "outside": "drop"}, "outside='drop' must be one of truncate, mask"),
        ({"level": "geometric"}, "outside='truncate' must be 'mask' with level='geometric'"),
        ({"level": "total_variation", "outside": "mask"}, r"cap=2.0 must be in \(0, 1\]"),
        ({"level": "total_variation", "outside": "mask", "floor": 0.1, "cap": 0.2}, "floor=0.1"),
    ],
)
def test_wrong_options_are_refused(options, message):
    arrays = (*map(jnp.asarray, logprobs_of(0)), jnp.asarray(MASK))
    raised(ValueError, message, algorithms.importance_weights, *arrays, **options)
