"""Losses of given responses, and what does not see them; by hand and with loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax import algorithms
from semrl_jax.algorithms.algorithm import Passes
from semrl_jax.algorithms.given import GIVEN_SURROGATES
from semrl_jax.metrics import Measurement
from semrl_jax.shaping import init_shaping_state
from tests.algorithms.test_credit import MASK, REWARDS, credit_of, make_metrics

GIVEN = np.arange(8) % 4 == 3  # the last response of each group


def losses_by_hand(name, logprob, old, advantage):
    """The loss of a token and its derivative with respect to its log-probability."""
    p, q = np.exp(logprob), np.exp(old)
    if name == "luffy":
        return -advantage * p / (p + 0.1), -advantage * 0.1 * p / (p + 0.1) ** 2
    if name == "rl_plus":
        value = -advantage * np.sqrt(1 - p) * 2 * p / (q + 0.5 * (q + 1))
        return value, value  # p stays in the root
    return -logprob, -1.0


@pytest.mark.parametrize("name", GIVEN_SURROGATES)
def test_a_given_token_has_its_loss_and_the_others_keep_theirs(name):
    random = np.random.default_rng(0)
    old = -random.exponential(size=(4, 5))
    logprobs = np.minimum(old + 0.3 * random.normal(size=old.shape), -0.01)
    advantages, entropy = random.normal(size=(2, *old.shape))
    weights, given = np.full(old.shape, 0.05), np.arange(4)[:, None] * np.ones(5) == 2

    def loss(logprobs, **options):
        return algorithms.policy_loss(
            logprobs,
            jnp.asarray(entropy, jnp.float32),
            old_logprobs=jnp.asarray(old, jnp.float32),
            ref_logprobs=None,
            advantages=jnp.asarray(advantages, jnp.float32),
            weights=jnp.asarray(weights, jnp.float32),
            kl_coefficient=0.0,
            entropy_coefficient=0.0,
            **options,
        )

    of = jax.value_and_grad(loss, has_aux=True)
    (plain, _), gradient = of(jnp.asarray(logprobs, jnp.float32))
    (value, report), found = of(
        jnp.asarray(logprobs, jnp.float32),
        given=jnp.asarray(given),
        given_surrogate=name,
        given_coefficient=0.5,
    )
    np.testing.assert_array_equal(found[~given], gradient[~given])
    hand = [
        losses_by_hand(name, *values)
        for values in zip(logprobs[given], old[given], advantages[given], strict=True)
    ]
    np.testing.assert_allclose(found[given], [0.025 * slope for _, slope in hand], rtol=1e-5)
    of_given = sum(0.025 * each for each, _ in hand)
    np.testing.assert_allclose(report["policy/given_loss"], of_given, rtol=1e-5)
    ratio = np.exp(logprobs - old)
    terms = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 0.8, 1.2))
    np.testing.assert_allclose(value, of_given + 0.05 * terms[~given].sum(), rtol=1e-5)
    assert abs(value - plain) > 1e-3


def test_the_shaping_leaves_given_responses_out(config):
    """Baselines are of the sampled ones, and a given one has no bonus."""
    arguments = config, REWARDS, make_metrics(), MASK, init_shaping_state()
    baselines = credit_of(*arguments, given=GIVEN).memory.shaping
    means = [found.value[~GIVEN].mean() for found in make_metrics().values()]
    np.testing.assert_allclose(baselines.baseline, means, rtol=1e-6)
    expected = config.shaping.alpha * REWARDS.reshape(-1)[~GIVEN].mean()  # from 0
    np.testing.assert_allclose(baselines.reward_ema, expected, rtol=1e-6)
    high = {key: Measurement(found.value + 1, found.valid) for key, found in make_metrics().items()}
    plain = credit_of(*arguments, given=GIVEN).advantages
    shaped = credit_of(config, REWARDS, high, MASK, baselines, given=GIVEN).advantages
    assert (np.abs(shaped - plain)[:3] > 0).all()
    np.testing.assert_array_equal(shaped[GIVEN], plain[GIVEN])


def test_a_given_response_has_no_importance_weight(config):
    config.algorithms.importance.update(level="sequence", cap=9.0)
    zeros = np.zeros(MASK.shape, np.float32)
    rollout = np.where(GIVEN[:, None], np.nan, zeros - np.float32(0.5))
    arguments = config, REWARDS, make_metrics(), MASK, init_shaping_state()
    found = credit_of(*arguments, Passes(zeros), rollout_logprobs=rollout, given=GIVEN).advantages
    plain = credit_of(*arguments, Passes(zeros), rollout_logprobs=zeros).advantages
    weights = np.where(GIVEN, 1.0, np.exp(1.5))[:, None]
    np.testing.assert_allclose(found, weights * plain, rtol=1e-6)


@pytest.mark.parametrize(("surrogate", "first"), [("luffy", 0.5), ("sft", 2 / 3)])
def test_a_group_has_the_reward_of_a_given_response_unless_it_is_learned_anyway(
    config, surrogate, first
):
    """Rewards 1, 0, 0 and, of the given response, 1."""
    config.algorithms.name, config.algorithms.loss.given_surrogate = "dr_grpo", surrogate
    arguments = config, REWARDS, make_metrics(), MASK, init_shaping_state()
    found = credit_of(*arguments, given=GIVEN).advantages[:4, 0]
    expected = [first, first - 1, first - 1, 0.5 * (surrogate == "luffy")]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_bonus_in_the_reward_leaves_given_responses_out_of_the_mean(config):
    """The sampled responses are then compared with each other alone."""
    config.algorithms.name, config.algorithms.loss.given_surrogate = "dr_grpo", "sft"
    config.shaping.target = "reward"
    baselines = credit_of(
        config, REWARDS, make_metrics(), MASK, init_shaping_state(), given=GIVEN
    ).memory.shaping
    found = credit_of(config, REWARDS, make_metrics(1), MASK, baselines, given=GIVEN).advantages
    of_groups = np.asarray(found)[:, 0].reshape(2, 4)
    assert np.abs(of_groups[1, :3]).max() > 0.01  # equal rewards, so these are of the bonus
    np.testing.assert_allclose(of_groups[:, :3].sum(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(of_groups[:, 3], 0, atol=1e-6)
