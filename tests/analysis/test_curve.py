"""The sigmoid through the evaluations of a run."""

import numpy as np
import pytest

from semrl_jax.analysis.curve import Curve, fit, points
from tests.cases import refused


def sigmoid(compute, first, ceiling, efficiency, midpoint):
    return first + (ceiling - first) / (1 + (midpoint / compute) ** efficiency)


@pytest.mark.parametrize(
    "truth", [(0.1, 0.6, 1.7, 40.0), (0.0, 0.95, 0.8, 9.0), (-1, 3.0, 4.0, 70)]
)
def test_a_fit_finds_the_curve_that_made_the_points(truth):
    compute = np.arange(5.0, 101.0, 5.0)
    found = fit(compute, sigmoid(compute, *truth), truth[0])
    np.testing.assert_allclose(found, truth, rtol=1e-3)
    np.testing.assert_allclose(found.at(compute), sigmoid(compute, *truth), atol=1e-5)
    assert found.at(np.zeros(1)) == truth[0]


def test_no_point_nearby_has_a_smaller_error():
    random = np.random.default_rng(0)
    compute = np.arange(1.0, 31.0)
    values = sigmoid(compute, 0.2, 0.7, 2.0, 8.0) + 0.02 * random.normal(size=30)
    found = fit(compute, values, 0.2)

    def error(curve):
        return np.sum((values - sigmoid(compute, *curve)) ** 2)

    for place in (1, 2, 3):
        for factor in (0.99, 1.01):
            other = list(found)
            other[place] *= factor
            assert error(other) > error(found)


def test_the_ceiling_of_a_rate_is_at_most_one():
    compute = np.arange(1.0, 11.0)
    assert fit(compute, 0.05 * compute, 0.0).ceiling == 1.0
    assert fit(compute, 0.5 * compute, 0.0).ceiling > 5


def test_points_have_the_compute_before_them():
    rows = [
        {"step": 0, "acc": 0.1, "policy/flops": 2.0, "time/step_s": 3600.0},
        {"step": 1, "policy/flops": 3.0, "time/step_s": 1800.0},
        {"step": 2, "acc": 0.4},
    ]
    for unit, last in (("flops", 5.0), ("hours", 1.5), ("steps", 2.0)):
        found = points(rows, "acc", unit)
        assert found.compute.tolist() == [0.0, last] and found.values.tolist() == [0.1, 0.4]
    refused("no value of 'loss' at step 0", points, rows, "loss", "steps")
    # JSON lines of a log may have NaN and Infinity; a value that is none is no point.
    for value in (float("nan"), float("inf"), None):
        odd = [*rows[:1], {"step": 1, "acc": value, "time/step_s": 1800.0}, *rows[2:]]
        assert points(odd, "acc", "hours").values.tolist() == [0.1, 0.4]
        refused(
            "no value of 'acc' at step 0",
            points,
            [rows[0] | {"acc": value}, *rows[1:]],
            "acc",
            "steps",
        )
    without = [{"step": 0, "acc": 0.1}, {"step": 1, "acc": 0.2}]
    refused("has no 'policy/flops'", points, without, "acc", "flops")
    with pytest.raises(ValueError, match="3 points are too few"):
        fit(np.ones(3), np.ones(3), 0.0)


def test_a_curve_stays_finite_far_away():
    curve = Curve(0.0, 1.0, 20.0, 1e3)
    assert curve.at(np.array([0.0, 1e-300, 1e300])).tolist() == [0.0, 0.0, 1.0]
