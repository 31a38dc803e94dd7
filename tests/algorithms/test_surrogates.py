"""Surrogates of the policy gradient: against loops, against PyTorch, and what tells them apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax import algorithms
from semrl_jax.algorithms import SURROGATES, Bounds
from tests.oracles import algorithms as oracle

seeds = st.integers(0, 2**31 - 1)
names = tuple(SURROGATES)
BOUNDS = {"clip_epsilon": 0.1, "clip_epsilon_high": 0.3, "dual_clip": 1.5, "opmd_tau": 2.0}
BOUNDS |= {"rec_range": "ring", "rec_weighted": True, "rec_far_low": 0.3, "rec_far_high": 0.5}
BOUNDS["real_tau"] = 0.7
# Holes, a whole row, a single token, and a row without any.
MASK = np.array([[1, 1, 0, 1, 1, 0], [1] * 6, [1, 0, 0, 0, 0, 0], [0] * 6], bool)
WEIGHTS = np.asarray(algorithms.token_weights(jnp.asarray(MASK), aggregation="response_mean"))


@functools.cache
def loss_and_gradient(name, **bounds):
    def loss(logprobs, old, advantages, weights, ids):
        return algorithms.policy_loss(
            logprobs, jnp.zeros_like(logprobs), old_logprobs=old, ref_logprobs=None,
            advantages=advantages, weights=weights, sequence_ids=ids, surrogate=name,
            bounds=Bounds(**{**BOUNDS, **bounds}), kl_coefficient=0.0, entropy_coefficient=0.0,
        )  # fmt: skip

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


def inputs(seed, spread=0.4):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=MASK.shape)
    arrays = old + spread * rng.normal(size=MASK.shape), old, rng.normal(size=MASK.shape)
    return [array.astype(np.float32) for array in arrays]


@pytest.mark.parametrize("name", names)
@given(seed=seeds)
def test_losses_match_float64_loops(name, seed):
    arrays = inputs(seed)
    (loss, report), _ = loss_and_gradient(name)(*arrays, WEIGHTS, MASK.astype(np.int32))
    terms, changed = oracle.surrogate_terms(name, *arrays, MASK, low=0.1, high=0.3, dual=1.5, tau=2)
    # 1e-5 and 1e-6: eleven float32 terms near 1.
    np.testing.assert_allclose(loss, np.sum(terms * WEIGHTS), rtol=1e-5, atol=1e-6)
    # A ratio within rounding of its bound may count either way.
    assert abs(report["policy/clip_fraction"] - np.sum(changed * WEIGHTS)) < 1e-6


def torch_terms(name, logprobs, old, advantages):
    """Independent of the package; one response per row, without bounds that other tests cover."""
    mask = torch.tensor(MASK)
    difference = torch.where(mask, logprobs - old, 0.0)
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = torch.exp(difference)
    low, high = torch.tensor(0.9), torch.tensor(1.3)
    if name == "reinforce":
        return -advantages * logprobs
    if name == "cispo":
        return -torch.clamp(ratio, low, high).detach() * advantages * logprobs
    if name == "rec":
        outside = (ratio < low) | (ratio > high)
        outside &= ~((advantages > 0) & (ratio <= 0.7)) & ~((advantages < 0) & (ratio >= 1.5))
        return torch.where(outside, 0.0, -advantages * ratio.detach() * logprobs)
    if name == "real":
        mean = (difference.sum(dim=1, keepdim=True) / length).detach() + logprobs
        margin = torch.sign(advantages) * (mean - logprobs.detach()) / 0.7
        return advantages.abs() * torch.log1p(torch.exp(-margin))
    if name == "opmd":
        return (-advantages * logprobs + difference.sum(dim=1, keepdim=True) ** 2 / length) / 2
    if name == "gspo":
        mean = (difference.sum(dim=1, keepdim=True) / length).detach()
        ratio = torch.exp(mean + logprobs - logprobs.detach())
    if name == "dcpo":
        q = torch.exp(old)
        low = 0.5 + torch.sqrt((0.25 - 0.1 / q).clamp(min=0))
        high = (0.5 + torch.sqrt(0.25 + 0.3 / q)).clamp(max=10)
    bounded = torch.minimum(torch.maximum(ratio, low), high)
    term = torch.maximum(-advantages * ratio, -advantages * bounded)
    limit = -advantages * 1.5
    return torch.where((advantages < 0) & (term > limit), limit, term)


@pytest.mark.parametrize("name", names)
def test_gradients_match_torch(name):
    arrays = inputs(1, spread=0.6)
    (_, report), gradients = loss_and_gradient(name)(*arrays, WEIGHTS, MASK.astype(np.int32))
    assert report["policy/clip_fraction"] > 0 or name in ("reinforce", "opmd", "real")
    tensors = [torch.tensor(array, dtype=torch.float64) for array in arrays]
    tensors[0].requires_grad_()
    (torch_terms(name, *tensors) * torch.tensor(WEIGHTS)).sum().backward()
    # 1e-5 and 1e-7: float32 terms of the size of the weights, 1/12 and more.
    np.testing.assert_allclose(gradients[0], tensors[0].grad.numpy(), rtol=1e-5, atol=1e-7)
    for gradient in gradients[1:]:  # none through old log-probabilities or advantages
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("name", names)
def test_tokens_that_do_not_count_may_hold_anything(name):
    arrays, ids = inputs(2), MASK.astype(np.int32)
    clean = loss_and_gradient(name)(*arrays, WEIGHTS, ids)
    for hostile in (np.nan, np.inf, -np.inf):
        dirty = [np.where(MASK, array, np.float32(hostile)) for array in arrays]
        found = loss_and_gradient(name)(*dirty, WEIGHTS, ids)
        for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(found)):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", names)
@pytest.mark.parametrize("gap", [-200.0, 200.0, 1e4])
def test_far_apart_policies_stay_finite(name, gap):
    _, old, advantages = inputs(3)
    result = loss_and_gradient(name)(
        old + np.float32(gap), old, advantages, WEIGHTS, MASK.astype(np.int32)
    )
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(result))


@pytest.mark.parametrize("name", [name for name in names if name != "opmd"])
def test_on_policy_all_have_the_gradient_of_the_policy_gradient_theorem(name):
    """At logprobs = old_logprobs: -weight * A on every token."""
    _, old, advantages = inputs(4)
    _, gradients = loss_and_gradient(name, real_tau=0.5)(
        old, old, advantages, WEIGHTS, MASK.astype(np.int32)
    )
    # 1e-6: products of two float32 numbers.
    np.testing.assert_allclose(gradients[0], -WEIGHTS * advantages, rtol=1e-6, atol=1e-9)


def gradient_of(name, ratio, advantage, q=0.5, **bounds):
    """The gradient of the loss of one token with this ratio."""
    old = np.log(np.array([[q]], np.float32))
    arrays = old + np.log(np.float32(ratio)), old, np.array([[advantage]], np.float32)
    ones = np.ones((1, 1), np.float32)
    _, gradients = loss_and_gradient(name, **bounds)(*arrays, ones, ones.astype(np.int32))
    return float(gradients[0][0, 0])


def test_clip_higher_lets_ratios_rise_further_than_they_fall():
    assert gradient_of("clip", 1.25, 1.0) != 0 and gradient_of("clip", 1.35, 1.0) == 0
    assert gradient_of("clip", 0.95, -1.0) != 0 and gradient_of("clip", 0.85, -1.0) == 0
    assert gradient_of("clip", 1.25, 1.0, clip_epsilon_high=0.0) == 0  # as far as below


def test_dual_clip_bounds_the_loss_of_a_negative_advantage_alone():
    assert gradient_of("clip", 1.6, -1.0) == 0 and gradient_of("clip", 1.4, -1.0) != 0
    assert gradient_of("clip", 1.6, -1.0, dual_clip=0.0) != 0
    assert gradient_of("clip", 0.5, 1.0) == gradient_of("clip", 0.5, 1.0, dual_clip=0.0)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    assert gradient_of("clip", 2.0, 1.0) == 0
    np.testing.assert_allclose(gradient_of("cispo", 2.0, 1.0), -1.3, rtol=1e-6)


def test_dcpo_widens_the_bounds_of_improbable_tokens():
    # Bounds worked by hand: q = 0.01 and 0.3 give sqrt(1 + 120) / 2 + 1 / 2 = 6; q = 0.9: 1.26.
    assert gradient_of("dcpo", 5.9, 1.0, q=0.01) != 0 and gradient_of("dcpo", 6.1, 1.0, q=0.01) == 0
    assert gradient_of("dcpo", 1.25, 1.0, q=0.9) != 0 and gradient_of("dcpo", 1.3, 1.0, q=0.9) == 0


def test_rec_tells_ranges_apart():
    """Gradients at ratios below, just outside, inside and above the bounds 0.9 and 1.3."""
    ratios = (0.5, 0.85, 1.0, 1.4, 3.0)
    for mode, positive, negative in (
        ("one_side", (1, 1, 1, 0, 0), (0, 0, 1, 1, 1)),
        ("two_side", (0, 0, 1, 0, 0), (0, 0, 1, 0, 0)),
        ("ring", (1, 0, 1, 0, 0), (0, 0, 1, 0, 1)),
    ):
        for sign, wanted in ((1.0, positive), (-1.0, negative)):
            for weighted in (False, True):
                found = [
                    gradient_of("rec", ratio, sign, rec_range=mode, rec_weighted=weighted)
                    for ratio in ratios
                ]
                sizes = np.array(wanted) * (np.array(ratios) if weighted else 1)
                np.testing.assert_allclose(found, -sign * sizes, rtol=1e-6)


def test_weighted_one_sided_rec_has_the_gradient_of_clip():
    arrays = inputs(6, spread=0.6)
    ids = MASK.astype(np.int32)
    _, (found, *_) = loss_and_gradient("rec", rec_range="one_side")(*arrays, WEIGHTS, ids)
    _, (clipped, *_) = loss_and_gradient("clip", dual_clip=0.0)(*arrays, WEIGHTS, ids)
    np.testing.assert_allclose(found, clipped, rtol=1e-6)


def test_real_fades_where_clip_grows():
    """A wrong response that became less probable has less gradient, one still probable has more."""
    low, same, high = (abs(gradient_of("real", r, -1.0, real_tau=0.5)) for r in (0.5, 1.0, 2.0))
    assert low < same == pytest.approx(1.0) and same < high < 2.0


def test_gspo_clips_whole_responses():
    """One token far off its bound does not matter if the mean of the response lies within."""
    old = np.zeros((1, 4), np.float32) - 1
    logprobs = old + np.array([[0.6, -0.2, -0.2, -0.2]], np.float32)
    ones = np.ones((1, 4), np.float32)
    for name, has_gradient in (("gspo", [True] * 4), ("clip", [False, True, True, True])):
        _, gradients = loss_and_gradient(name)(logprobs, old, ones, ones / 4, ones.astype(np.int32))
        assert (gradients[0][0] != 0).tolist() == has_gradient


def test_reinforce_needs_no_old_logprobs_and_others_do():
    logprobs, old, advantages = map(jnp.asarray, inputs(5))
    arguments = {"advantages": advantages, "weights": jnp.asarray(WEIGHTS), "ref_logprobs": None}
    arguments |= {"old_logprobs": None, "kl_coefficient": 0.0}
    loss, report = algorithms.policy_loss(logprobs, logprobs, surrogate="reinforce", **arguments)
    assert np.isfinite(loss) and "policy/approx_kl" not in report
    with pytest.raises(ValueError, match="surrogate='clip' needs old_logprobs, which is None"):
        algorithms.policy_loss(logprobs, logprobs, **arguments)
    arguments["old_logprobs"] = old
    with pytest.raises(ValueError, match="surrogate='gspo' needs sequence_ids, which is None"):
        algorithms.policy_loss(logprobs, logprobs, surrogate="gspo", **arguments)
    with pytest.raises(ValueError, match=r"surrogate='trpo' is unknown.*clip, gspo"):
        algorithms.policy_loss(logprobs, logprobs, surrogate="trpo", **arguments)
