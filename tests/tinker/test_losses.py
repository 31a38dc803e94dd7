"""The losses and their gradients, against the formulas of Tinker's documentation in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax.tinker.losses import LOSSES

LOW, HIGH, BETA = 0.7, 1.4, 0.3


def cross_entropy(p, weights):
    return -(p * weights).sum(), -weights


def importance_sampling(p, q, advantages):
    ratio = np.exp(p - q)
    return -(ratio * advantages).sum(), -ratio * advantages


def ppo(p, q, advantages):
    ratio = np.exp(p - q)
    clipped = np.clip(ratio, LOW, HIGH)
    is_plain = ratio * advantages <= clipped * advantages
    return (
        -np.minimum(ratio * advantages, clipped * advantages).sum(),
        np.where(is_plain, -ratio * advantages, 0.0),
    )


def cispo(p, q, advantages):
    clipped = np.clip(np.exp(p - q), LOW, HIGH)
    return -(clipped * p * advantages).sum(), -clipped * advantages


def dro(p, q, advantages):
    loss = -(p * advantages - 0.5 * BETA * (p - q) ** 2).sum()
    return loss, -(advantages - BETA * (p - q))


def gspo(p, q, advantages, mask):
    ratio = np.exp(np.array([[(a - b)[m != 0].mean()] for a, b, m in zip(p, q, mask)]))
    clipped = np.clip(ratio, LOW, HIGH)
    is_plain = ratio * advantages <= clipped * advantages
    return (
        -np.minimum(ratio * advantages, clipped * advantages).sum(),
        np.where(is_plain, -ratio * advantages, 0.0),
    )


ORACLES = {f.__name__: f for f in (cross_entropy, importance_sampling, ppo, cispo, dro, gspo)}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_match_the_formulas(name):
    random = np.random.default_rng(0)
    p = -random.exponential(size=(3, 40))
    shift = np.array([[-0.5], [0.0], [0.6]])  # GSPO clips two sequences of three
    arrays = {
        "logprobs": p + random.normal(scale=0.5, size=p.shape) + shift,
        "advantages": random.normal(size=p.shape),
        "weights": random.integers(0, 2, size=p.shape).astype(float),
        "sequence_ratio_mask": random.integers(0, 2, size=p.shape).astype(float),
    }
    loss = LOSSES[name]
    inputs = {key: jnp.float32(arrays[key]) for key in loss.inputs}
    given = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH, "beta": BETA}
    options = {key: jnp.float32(given[key]) for key in loss.options}
    found, gradient = jax.value_and_grad(lambda p: loss.terms(p, inputs, options).sum())(
        jnp.float32(p)
    )
    expected, of_p = ORACLES[name](p, *(arrays[key] for key in loss.inputs))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, of_p, rtol=1e-4, atol=1e-6)


def test_defaults_are_those_of_the_documentation():
    assert dict(LOSSES["ppo"].options) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert dict(LOSSES["cispo"].options) == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
