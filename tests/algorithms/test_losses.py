"""Policy and value losses, KL estimators and the KL penalty."""

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
COEFFICIENTS = {"kl_coefficient": 0.3, "entropy_coefficient": 0.1}
MASK = np.arange(6) < np.array([6, 1, 4])[:, None]


@jax.jit
def clipped(logprobs, old, advantages, weights):
    _, report = algorithms.policy_loss(
        logprobs, jnp.zeros_like(logprobs), old_logprobs=old, ref_logprobs=None,
        advantages=advantages, weights=weights, kl_coefficient=0.0,
    )  # fmt: skip
    return report["policy/pg_loss"], report["policy/clip_fraction"]


@functools.cache
def value_and_grad(estimator="low_var_kl"):
    def loss(logprobs, entropy, old, ref, advantages, weights):
        return algorithms.policy_loss(
            logprobs,
            entropy,
            old_logprobs=old,
            ref_logprobs=ref,
            advantages=advantages,
            weights=weights,
            kl_estimator=estimator,
            **COEFFICIENTS,
        )

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True))


def inputs(seed, spread=0.4):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=MASK.shape)
    logprobs, ref = (old + spread * rng.normal(size=MASK.shape) for _ in range(2))
    arrays = logprobs, rng.exponential(size=MASK.shape), old, ref, rng.normal(size=MASK.shape)
    return [array.astype(np.float32) for array in arrays]


def weights_of(mask, aggregation="token_mean"):
    return algorithms.token_weights(jnp.asarray(mask), aggregation=aggregation, constant_length=5)


@given(seed=seeds, estimator=st.sampled_from(algorithms.KL_ESTIMATORS))
def test_policy_loss_matches_float64_loops(seed, estimator):
    arrays, weights = inputs(seed), np.asarray(weights_of(MASK))
    (loss, report), _ = value_and_grad(estimator)(*arrays, weights)
    expected = oracle.policy_loss(
        *arrays, weights, eps=0.2, c_kl=0.3, c_ent=0.1, estimator=estimator
    )
    keys = ("loss", "clip_fraction", "approx_kl", "entropy", "kl")
    actual = [report[f"policy/{key}"] for key in keys]
    # 1e-6: eleven float32 terms near 1.
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert loss == report["policy/loss"]


@pytest.mark.parametrize("estimator", algorithms.KL_ESTIMATORS)
def test_gradients_match_torch(estimator):
    arrays, weights = inputs(0), np.asarray(weights_of(MASK))
    _, gradients = value_and_grad(estimator)(*arrays, weights)
    tensors = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays]
    logprobs, entropy, old, ref, advantages = tensors
    ratio = torch.exp(logprobs - old.detach())
    plain = -advantages.detach() * ratio
    clipped = -advantages.detach() * ratio.clamp(0.8, 1.2)
    x = logprobs - ref.detach()
    kl = {
        "kl": x,
        "abs": x.abs(),
        "mse": x * x / 2,
        "low_var_kl": (torch.exp(-x) + x - 1).clamp(-10, 10),
        "low_var_kl+": x * x / 2,  # the gradient is that of mse
    }[estimator]
    total = torch.maximum(plain, clipped) - 0.1 * entropy + 0.3 * kl
    (total * torch.tensor(weights, dtype=torch.float64)).sum().backward()
    for gradient, tensor in zip(gradients, tensors):
        expected = np.zeros(MASK.shape) if tensor.grad is None else tensor.grad.numpy()
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


@given(seed=seeds)
def test_masked_tokens_may_hold_anything(seed):
    arrays, weights = inputs(seed), np.asarray(weights_of(MASK))
    clean = value_and_grad()(*arrays, weights)
    for hostile in (np.nan, np.inf, -np.inf):
        dirty = [np.where(MASK, array, np.float32(hostile)) for array in arrays]
        for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(value_and_grad()(*dirty, weights))):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("aggregation", algorithms.AGGREGATIONS)
def test_micro_batches_add_up_to_their_mini_batch(aggregation):
    arrays, weights = inputs(1), np.asarray(weights_of(MASK, aggregation))
    (loss, report), gradients = value_and_grad()(*arrays, weights)
    loss_sum, kl_sum, parts = 0.0, 0.0, []
    for i in range(len(MASK)):
        one = [array[i : i + 1] for array in arrays]
        (part, scalars), gradient = value_and_grad()(*one, weights[i : i + 1])
        loss_sum, kl_sum = loss_sum + part, kl_sum + scalars["policy/kl"]
        parts.append(gradient[0])
    # 1e-6: the sums are taken in another order.
    np.testing.assert_allclose(loss_sum, loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(kl_sum, report["policy/kl"], rtol=1e-5)
    np.testing.assert_allclose(np.concatenate(parts), gradients[0], rtol=1e-6)


def test_weights_by_hand():
    mask = np.array([[True, True, True], [True, False, False], [False, False, False]])
    np.testing.assert_allclose(weights_of(mask), mask / 4)
    expected = [[1 / 6] * 3, [1 / 2, 0, 0], [0, 0, 0]]  # empty responses do not count
    np.testing.assert_allclose(weights_of(mask, "response_mean"), expected, rtol=1e-6)
    np.testing.assert_allclose(weights_of(mask, "constant_length"), mask / 15, rtol=1e-6)
    longest = algorithms.token_weights(
        jnp.asarray(mask), aggregation="constant_length", constant_length=2**31 - 1
    )
    np.testing.assert_allclose(longest, mask / (len(mask) * (2**31 - 1)), rtol=1e-6)
    with pytest.raises(ValueError, match="constant_length=0 must be at least 1"):
        algorithms.token_weights(jnp.asarray(mask), aggregation="constant_length")
    for aggregation in algorithms.AGGREGATIONS:
        assert not np.any(weights_of(np.zeros((2, 3), bool), aggregation))
    raised(ValueError, "aggregation='sum'", weights_of, mask, "sum")


@pytest.mark.parametrize("gap", [-1e4, -200.0, -60.0, 60.0, 200.0, 1e4])
def test_far_apart_policies_stay_finite(gap):
    _, entropy, old, _, advantages = inputs(2)
    advantages[0, 0] = 0.0  # 0 * inf would be NaN
    for estimator in algorithms.KL_ESTIMATORS:
        result = value_and_grad(estimator)(
            old + np.float32(gap), entropy, old, old, advantages, np.asarray(weights_of(MASK))
        )
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(result))


def test_kl_estimators_by_hand():
    x = jnp.array([0.5, -0.5, 0.0, -5.0])
    expected = {
        "kl": [0.5, -0.5, 0.0, -5.0],
        "abs": [0.5, 0.5, 0.0, 5.0],
        "mse": [0.125, 0.125, 0.0, 12.5],
        "low_var_kl": [0.106531, 0.148721, 0.0, 10.0],
        "low_var_kl+": [0.106531, 0.148721, 0.0, 10.0],
    }
    for estimator, values in expected.items():
        actual = algorithms.kl_estimate(x, jnp.zeros(4), estimator=estimator)
        np.testing.assert_allclose(actual, values, rtol=1e-5)
    raised(ValueError, "kl_estimator='full'", algorithms.kl_estimate, x, x, estimator="full")


def test_low_variance_estimate_of_close_policies_is_accurate():
    # exp(-x) + x - 1 as written leaves nothing of x^2 / 2 = 5e-9 in float32.
    actual = algorithms.kl_estimate(jnp.array([1e-4]), jnp.zeros(1))
    np.testing.assert_allclose(actual, [5e-9], rtol=5e-3)


def test_penalised_rewards_by_hand():
    mask = jnp.array([[True, True, False]])
    nan = jnp.nan
    rewards, mean = jax.jit(functools.partial(algorithms.penalised_rewards, coefficient=0.1))(
        jnp.array([[0.0, 1.0, nan]]),
        jnp.array([[-1.0, -2.0, nan]]),
        jnp.array([[-1.5, -1.0, nan]]),
        mask,
    )
    np.testing.assert_allclose(rewards, [[-0.05, 1.1, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(mean, (0.5 - 1.0) / 2, rtol=1e-6)


@pytest.mark.parametrize("kl, factor", [(0.1, 1.0), (0.11, 1.01), (9.0, 1.02), (0.0, 0.98)])
def test_kl_coefficient_moves_towards_its_target(kl, factor):
    actual = algorithms.update_kl_coefficient(
        0.5, jnp.float32(kl), target=0.1, horizon=100, num_responses=10
    )
    np.testing.assert_allclose(actual, 0.5 * factor, rtol=1e-6)


def test_no_reference_is_needed_without_kl():
    logprobs, entropy, old, ref, advantages = map(jnp.asarray, inputs(0))
    arguments = {"old_logprobs": old, "advantages": advantages, "weights": weights_of(MASK)}

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(logprobs, ref):
        return algorithms.policy_loss(
            logprobs, entropy, ref_logprobs=ref, **arguments, kl_coefficient=0.0
        )

    (with_ref, report), gradient = loss(logprobs, ref)
    (without, rest), same = loss(logprobs, None)
    assert report.pop("policy/kl") > 0  # computed if there is a reference
    assert (without, rest) == (with_ref, report)
    np.testing.assert_array_equal(same, gradient)
    arguments["ref_logprobs"] = None
    raised(ValueError, "needs ref_logprobs", algorithms.policy_loss, logprobs, entropy, **arguments)


def test_value_loss_by_hand_and_its_gradient():
    # V = 2 moved from 0 past the clip of 0.5, R = 1: errors 1 and 0.25, the larger counts.
    # V = 2 moved from 0, R = 3: errors 1 and 6.25: clipped, no gradient.
    values, old = np.array([[2.0, 2.0, np.nan]], np.float32), np.zeros((1, 3), np.float32)
    returns = np.array([[1.0, 3.0, np.nan]], np.float32)
    weights = np.array([[0.5, 0.5, 0.0]], np.float32)
    (loss, report), gradient = jax.jit(jax.value_and_grad(algorithms.value_loss, has_aux=True))(
        values, old, returns, weights
    )
    np.testing.assert_allclose(loss, 0.5 * (0.5 * 1.0 + 0.5 * 6.25), rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0.5, 0.0, 0.0]], rtol=1e-6)
    assert report["critic/clip_fraction"] == 0.5
    assert report["critic/predicted_value"] == 2.0


def test_losses_match_the_recorded_ones(golden):
    data = np.load(golden / "rl_losses.npz")
    mask = data["mask"].astype(bool)
    weights = weights_of(mask)
    # 1e-5 throughout: another order of float32 sums.
    loss, share = clipped(
        jnp.asarray(data["log_probs"]),
        jnp.asarray(data["old_log_probs"]),
        jnp.asarray(data["grpo_advantages"]),
        weights,
    )
    approx_kl = algorithms.weighted_sum(
        jnp.asarray(data["old_log_probs"] - data["log_probs"]), weights
    )
    np.testing.assert_allclose(share, data["pg_clipfrac"], rtol=1e-5)
    np.testing.assert_allclose(approx_kl, data["approx_kl"], atol=1e-7)
    np.testing.assert_allclose(loss, data["pg_loss"], rtol=1e-5)
    loss, report = algorithms.value_loss(
        *(jnp.asarray(data[key]) for key in ("vpreds", "values", "gae_returns")), weights
    )
    np.testing.assert_allclose(loss, data["value_loss"], rtol=1e-5)
    np.testing.assert_allclose(report["critic/clip_fraction"], data["value_clipfrac"], rtol=1e-5)
    for estimator in algorithms.KL_ESTIMATORS:
        actual = algorithms.kl_estimate(
            jnp.asarray(data["log_probs"]), jnp.asarray(data["ref_log_probs"]), estimator=estimator
        )
        # 2e-7: the recorded low_var_kl subtracts numbers near 1.
        np.testing.assert_allclose(
            actual, data[f"kl_{estimator.rstrip('+')}"], rtol=1e-5, atol=2e-7
        )
