"""What the reference implementation gets wrong about shaping; docs/verl.md has the whole table."""

import ast
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import semrl_jax.evaluation
from semrl_jax import algorithms, shaping
from tests.shaping import by_name
from tests.shaping.by_name import metrics_of

ERA, ERV, ER = shaping.INDICATORS


def state_after(*batches, **options):
    state = shaping.init_shaping_state()
    for batch in batches:
        state = by_name.update_shaping_state(state, batch, **options)
    return state


AVERAGE = metrics_of([1.0, 1.0], [5.0, 5.0], [20.0, 20.0])
HIGH = metrics_of([1.0, 1.0], [6.0, 6.0], [26.0, 26.0])


def test_shaping_the_advantage_alone_shapes_it():
    # The release computes the signal only if it also goes into the reward.
    state, mask = state_after(AVERAGE), jnp.ones((2, 4), bool)
    advantages = jnp.array([[1.0] * 4, [-1.0] * 4])
    shaped, report = by_name.shape_advantages(advantages, HIGH, mask, state)  # the defaults
    assert report["shaping/bonus/mean"] > 0.1
    assert np.all(np.asarray(shaped - advantages) > 0.1)
    with_reward, _ = by_name.shape_advantages(advantages, HIGH, mask, state, target="both")
    np.testing.assert_array_equal(with_reward, shaped)  # the bonus counts once here


def test_the_bonus_is_not_diluted_by_the_length():
    # On one token of T, a token mean would see 1/T of it.
    state, means = state_after(AVERAGE), []
    for num_tokens in (4, 400):
        mask = jnp.ones((2, num_tokens), bool)
        advantages = jnp.ones((2, num_tokens))
        shaped, _ = by_name.shape_advantages(advantages, HIGH, mask, state)
        means.append(float(jnp.mean(shaped - advantages)))
        last, _ = by_name.shape_advantages(advantages, HIGH, mask, state, reproduce_release=True)
        diluted = float(jnp.mean(last - advantages))
        np.testing.assert_allclose(diluted, means[-1] / num_tokens, rtol=1e-4)
    assert means[0] > 0.1
    np.testing.assert_allclose(means[0], means[1], rtol=1e-6)


def test_an_average_response_deviates_by_nothing_from_the_second_step_on():
    # With zero baselines the deviation is clipped at 5 and decreases over ten steps.
    mask, advantages = jnp.ones((2, 3), bool), jnp.ones((2, 3))
    state, seen = shaping.init_shaping_state(), []
    for _ in range(5):
        report = by_name.shape_advantages(advantages, AVERAGE, mask, state)[1]
        seen.append([float(report[f"shaping/deviation/{n}/mean"]) for n in shaping.INDICATORS])
        state = by_name.update_shaping_state(state, AVERAGE)
    np.testing.assert_allclose(np.array(seen)[1:], 0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("release", "expected"),
    [(False, ((1.0 + 2.0) / 2 + 4.0) / 2), (True, ((0.0 + 1.0) / 2 + 2.0) / 2)],
)
def test_the_baseline_contains_every_earlier_step(release, expected):
    batches = [metrics_of([x, x], [x, x], [x, x]) for x in (1.0, 2.0, 4.0)]
    state = state_after(*batches, alpha=0.5, reproduce_release=release)
    np.testing.assert_allclose(state.baseline, expected)


def test_rewards_and_bonus_are_more_precise_than_bfloat16():
    # Spacing of bfloat16 for scores near 1: 2^-7. These differ by 2^-10.
    rewards = jnp.array([[1.0, 1.0 + 2**-10]])
    assert len(np.unique(np.asarray(rewards.astype(jnp.bfloat16)))) == 1
    advantages = algorithms.group_relative_advantages(rewards)
    expected = np.array([[-1, 1]]) / np.sqrt(2)
    # 2e-3: the estimator's epsilon of 1e-6 compared with a deviation of 7e-4.
    np.testing.assert_allclose(advantages, expected, rtol=2e-3)
    # A bonus of about 1e-3 on an advantage of 1 is below that spacing as well.
    slightly = metrics_of([1.0, 1.0], [5.01, 5.01], [20.04, 20.04])
    mask, ones = jnp.ones((2, 3), bool), jnp.ones((2, 3))
    shaped, _ = by_name.shape_advantages(ones, slightly, mask, state_after(AVERAGE))
    assert shaped.dtype == jnp.float32
    # beta = 1/2 and both deviations are 0.002.
    np.testing.assert_allclose(shaped - ones, np.tanh(0.002), rtol=1e-3)


def test_evaluation_imports_nothing_of_shaping_or_metrics():
    # Its scores are the verifier's, under one key; no second, shaped one can exist. The measurer
    # is what its caller hands on to the sampler.
    folder = pathlib.Path(semrl_jax.evaluation.__file__).parent
    imported = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
    assert any(name.startswith("semrl_jax.") for name in imported if name)
    others = ("semrl_jax.shaping", "semrl_jax.metrics")
    found = {name for name in imported if name and name.startswith(others)}
    assert found <= {"semrl_jax.metrics.measurer", "semrl_jax.metrics.measurer.Measurer"}
