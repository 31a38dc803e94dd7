"""Metrics of groups in a batch, against NumPy."""

import numpy as np
import pytest

from semrl_jax.metrics import MetricKey, lidar
from semrl_jax.metrics.names import GROUP_METRICS
from semrl_jax.runs import validate
from semrl_jax.sampling.scoring import Scored
from semrl_jax.training.probes.groups import group_indicators
from tests.cases import refused
from tests.fixtures import make_scored
from tests.tiny import tiny_config

NOVELTY = MetricKey("elliptical_novelty")
GROUPS = (slice(0, 4), slice(4, 8), slice(8, 9))


@pytest.fixture
def states():
    return np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32)


def batch(states):
    """Groups of 4, 4 and 1 responses; the states are of the second layer."""
    means = np.stack([np.full_like(states, np.nan), states], axis=1)
    return Scored([make_scored(i) for i in range(len(states))], mean_states=means)


def unit(rows):
    return rows.astype(np.float64) / np.linalg.norm(rows, axis=1, keepdims=True)


def test_novelty_is_measured_within_each_group(states):
    metrics, _ = group_indicators(("elliptical_novelty",), batch(states), (0, -1))
    values, valid = metrics[NOVELTY]
    assert valid.tolist() == [True] * 8 + [False]
    assert values[8] == 0.0
    for group in GROUPS[:2]:
        rows = unit(states[group])
        for i, row in enumerate(rows):
            others = np.delete(rows, i, axis=0)
            expected = row @ np.linalg.inv(np.eye(6) + others.T @ others) @ row
            assert values[group.start + i] == pytest.approx(expected, rel=1e-5)  # float32


def test_the_numbers_of_the_groups_are_logged(states):
    metrics, found = group_indicators(("lidar", "log_determinant"), batch(states), (0, -1))
    assert metrics == {}
    volumes = [
        np.linalg.slogdet(np.eye(len(rows)) + rows @ rows.T)[1]
        for rows in (unit(states[group]) for group in GROUPS)
    ]
    assert found["groups/log_determinant"] == pytest.approx(np.mean(volumes), rel=1e-5)
    mask = np.ones((3, 4), bool)
    mask[2, 1:] = False
    classes = np.concatenate([states, np.zeros((3, 6), np.float32)]).reshape(3, 4, 6)
    assert found["groups/lidar"] == pytest.approx(float(lidar(classes, mask)))


def test_given_responses_are_left_out(states):
    """The engine has no states of them; here the last one of each group of four."""
    sampled = np.arange(8) % 4 < 3
    items = [
        make_scored(i, finish_reason="eos" if own else "given") for i, own in enumerate(sampled)
    ]
    means = np.where(sampled[:, None], states[:8], np.nan)
    found, scalars = group_indicators(GROUP_METRICS, Scored(items, {}, means[:, None]), (-1,))
    items = [make_scored(i, group_size=3) for i in range(6)]
    without = Scored(items, {}, states[:8][sampled][:, None])
    expected, of_sampled = group_indicators(GROUP_METRICS, without, (-1,))
    values, valid = found[NOVELTY]
    assert valid.tolist() == sampled.tolist()
    np.testing.assert_allclose(values[sampled], expected[NOVELTY].value, rtol=1e-5)
    assert scalars == pytest.approx(of_sampled, rel=1e-5) and len(scalars) == 2


def test_a_state_that_is_not_finite_leaves_out_its_group(states):
    clean, of_clean = group_indicators(GROUP_METRICS, batch(states[4:8]), (0, -1))
    states[2, 3] = np.nan
    metrics, found = group_indicators(GROUP_METRICS, batch(states[:8]), (0, -1))
    values, valid = metrics[NOVELTY]
    assert valid.tolist() == [False] * 4 + [True] * 4
    np.testing.assert_array_equal(values[4:], clean[NOVELTY].value)
    assert found == {"groups/log_determinant": of_clean["groups/log_determinant"]}


def test_nothing_is_measured_without_names(states):
    assert group_indicators((), batch(states), (0, -1)) == ({}, {})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"metrics.of_groups": ("drift",)}, "of_groups"),
        ({"hidden_states.source": "none", "shaping.target": "none"}, "needs hidden states"),
        ({"shaping.guidance": "elliptical_novelty_velocity"}, "which is unknown"),
        ({"metrics.of_groups": ("lidar",), "shaping.guidance": "elliptical_novelty"}, "is unknown"),
    ],
)
def test_wrong_settings_are_refused(fields, match):
    config = tiny_config()
    config.metrics.of_groups = GROUP_METRICS
    validate(config)
    config.update_from_flattened_dict(fields)
    refused(match, validate, config)
