"""Values along a response."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax import metrics
from semrl_jax.analysis.along import along_responses, velocity_and_acceleration
from semrl_jax.models.of_config import build_policy
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def policy():
    return build_policy(tiny_config())[0]


@pytest.fixture(scope="module")
def params(policy):
    return jax.tree.map(lambda leaf: 3 * leaf, policy.init(jax.random.key(0)))


@pytest.mark.slow
def test_the_values_are_those_of_a_forward_pass_of_the_response(policy, params):
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 20, size, np.int32) for size in (4, 7)]
    responses = [random.integers(3, 20, size, np.int32) for size in (50, 9)]
    found = along_responses(policy, params, prompts, responses, stride=8)
    for prompt, response, along in zip(prompts, responses, found):
        ids = jnp.asarray(np.concatenate([prompt, response]))[None]
        places = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        states = policy.final_states(params, ids, places, jnp.ones_like(ids))
        states = states[0, len(prompt) - 1 : -1]
        logits = np.asarray(policy.logits(params, states), np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        # float32 rounding of logits up to 40, through a layer of large weights; a shift by one
        # token changes these values by several nats.
        expected = logprobs[np.arange(len(response)), response]
        np.testing.assert_allclose(along.logprob, expected, atol=5e-4)
        entropies = -(np.exp(logprobs) * logprobs).sum(axis=1)
        np.testing.assert_allclose(along.entropy, entropies, atol=5e-4)
        np.testing.assert_array_equal(along.num_tokens, np.arange(8, len(response) + 1, 8))
        mask = jnp.ones(len(response), bool)
        whole = metrics.rank_dynamics(states, mask, stride=8, method="gram")
        for values, mean in (
            (along.velocity, whole.effective_rank_velocity),
            (along.acceleration, whole.effective_rank_acceleration),
        ):
            terms = values[np.isfinite(values)]
            # The padded batch sums in another order: ER has 4 to 5 digits with method="gram".
            np.testing.assert_allclose(terms.mean() if len(terms) else 0.0, mean, atol=2e-3)


def test_terms_begin_with_the_second_and_third_prefix():
    velocity, acceleration = velocity_and_acceleration(np.float32([2, 4, 9]))
    np.testing.assert_array_equal(velocity, np.float32([np.nan, 2, 6]))
    np.testing.assert_array_equal(acceleration, np.float32([np.nan, np.nan, 4]))
    assert [len(x) for x in velocity_and_acceleration(np.float32([]))] == [0, 0]


@pytest.mark.slow
def test_context_has_no_value_and_no_place_in_a_prefix(policy, params):
    random = np.random.default_rng(1)
    prompt, response = (random.integers(3, 20, size, np.int32) for size in (4, 30))
    mask = np.ones(30, bool)
    mask[10:17] = False
    (whole,), (holes,) = (
        along_responses(policy, params, [prompt], [response], masks, stride=4)
        for masks in (None, [mask])
    )
    np.testing.assert_array_equal(holes.num_tokens, np.arange(4, 24, 4))
    assert np.isnan(holes.logprob[~mask]).all() and np.isnan(holes.entropy[~mask]).all()
    np.testing.assert_array_equal(holes.logprob[mask], whole.logprob[mask])
    np.testing.assert_array_equal(holes.effective_rank[:2], whole.effective_rank[:2])
    assert (holes.effective_rank[2:] != whole.effective_rank[2 : len(holes.num_tokens)]).all()
