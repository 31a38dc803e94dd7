"""Errors and bootstrap intervals of figures."""

import math

import numpy as np
import pytest

from semrl_jax.evaluation import statistics
from semrl_jax.evaluation.protocols import PerProblem


def figure(values, weights=None):
    return PerProblem(
        np.asarray(values, float), None if weights is None else np.asarray(weights, float)
    )


def interval(values, weights=None, benchmark="sums"):
    return statistics.interval(statistics.bootstrap({"x": figure(values, weights)}, benchmark)["x"])


def test_draws_are_means_over_resampled_problems():
    # Powers of two: the mean of a draw shows how often it took each problem.
    values = 8.0 ** np.arange(4)
    draws = statistics.bootstrap({"x": figure(values)}, "sums")["x"]
    assert draws.shape == (statistics.NUM_DRAWS,)
    totals = np.rint(draws * 4).astype(int)
    counts = totals[:, None] // 8 ** np.arange(4) % 8
    assert (counts.sum(axis=1) == 4).all()
    # Each problem is in a draw once on average, with standard deviation 0.87 / sqrt(2000) = 0.02.
    np.testing.assert_allclose(counts.mean(axis=0), 1, atol=0.08)


def test_weights_are_resampled_with_their_values():
    values, weights = [0.0, 1.0, 0.5], [1.0, 3.0, 0.0]
    draws = statistics.bootstrap({"x": figure(values, weights)}, "sums")["x"]
    # One to three of the first two problems, in all proportions.
    expected = {0.0, 1.0, 3 / 4, 3 / 5, 6 / 7}
    assert set(np.round(draws[~np.isnan(draws)], 9)) == {round(value, 9) for value in expected}
    # A draw of only the third problem has no weight: (1/3)^3 of the draws.
    assert abs(np.isnan(draws).mean() - 1 / 27) < 0.02
    assert not math.isnan(statistics.interval(draws)[0])


def test_an_interval_agrees_with_the_standard_error():
    values = np.random.default_rng(0).random(2000)
    low, high = interval(values)
    half = 1.96 * statistics.standard_error(figure(values))
    np.testing.assert_allclose((low + high) / 2, values.mean(), atol=0.1 * half)
    np.testing.assert_allclose((high - low) / 2, half, rtol=0.1)  # 3 % from the number of draws


def test_draws_depend_on_nothing_but_the_problems_and_the_name():
    values = np.random.default_rng(0).random(50)
    assert interval(values) == interval(values)
    assert interval(values) != interval(values, benchmark="another")
    # Other figures, and how many there are, do not change the draws.
    both = statistics.bootstrap({"y": figure(1 - values), "x": figure(values)}, "sums")
    np.testing.assert_allclose(both["x"], 1 - both["y"], rtol=1e-12)
    assert statistics.interval(both["x"]) == pytest.approx(interval(values), rel=1e-12)


def test_without_responses_there_is_no_interval():
    assert all(map(math.isnan, interval([0.5, 0.5], [0, 0])))
    assert all(map(math.isnan, interval([])))
    assert statistics.bootstrap({}, "sums") == {}


def test_a_paired_difference_is_narrower_than_the_figures():
    random = np.random.default_rng(0)
    one = random.random(400)
    other = one - 0.01 - 0.02 * random.random(400)  # always lower: mean 0.02
    draws = [statistics.bootstrap({"x": figure(v)}, "sums")["x"] for v in (one, other)]
    found = statistics.difference(one.mean(), draws[0], other.mean(), draws[1])
    np.testing.assert_allclose(found.difference, 0.02, atol=1e-3)
    low, high = found.interval
    assert 0.019 < low < high < 0.021 and found.share_above == 1.0
    own_low, own_high = interval(one)
    assert own_high - own_low > 20 * (high - low)
    back = statistics.difference(other.mean(), draws[1], one.mean(), draws[0])
    assert back.share_above == 0.0 and back.difference == -found.difference


def test_equal_policies_do_not_differ():
    values = np.random.default_rng(0).random(30)
    draws = statistics.bootstrap({"x": figure(values)}, "sums")["x"]
    found = statistics.difference(0.5, draws, 0.5, draws + 1e-17)
    assert found == statistics.Difference(0.0, (0.0, 0.0), 0.0)


@pytest.mark.slow
def test_intervals_cover_the_truth():
    # 300 simulated evaluations of 100 problems with 8 samples each. The accuracy over all problems
    # of the population is 1/2, because the difficulties are uniform in [0, 1].
    random = np.random.default_rng(0)
    covered = 0
    for trial in range(300):
        accuracy = random.binomial(8, random.random(100)) / 8
        low, high = interval(accuracy, benchmark=f"trial {trial}")
        covered += low <= 0.5 <= high
    # A percentile interval of 100 problems covers about 94.5 %. The standard deviation is 1.3 %.
    assert 0.905 <= covered / 300 <= 0.98
