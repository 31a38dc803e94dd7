"""The statistics of the benchmark of the critical path."""

import math

import numpy as np
import pytest

from benchmarks import critical_path
from benchmarks.critical_path import ORDERS, SIDES
from benchmarks.results import median_interval
from tests.tiny import tiny_config


def test_the_interval_of_six_and_of_fifteen_values_is_that_of_the_tables():
    assert median_interval([3, 1, 6, 2, 5, 4]) == (1, 6, 1 - 2 / 64)
    # k = 4 of 15: 1 - 2 (1 + 15 + 105 + 455) / 2^15
    assert median_interval(range(15)) == pytest.approx((3, 11, 1 - 1152 / 2**15))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_too_few_values_give_their_extremes_and_say_so(n):
    low, high, level = median_interval(range(n))
    assert (low, high) == (0, n - 1)
    assert level == pytest.approx(1 - 2 * 0.5**n)
    assert level < 0.95


@pytest.mark.parametrize("n", [6, 7, 15, 40])
def test_the_interval_is_the_narrowest_of_its_level(n):
    low, high, level = median_interval(range(n))
    tail = [sum(math.comb(n, j) for j in range(k)) / 2**n for k in range(n)]
    k = low + 1
    assert high == n - k
    assert level == pytest.approx(1 - 2 * tail[k]) and level >= 0.95
    assert 1 - 2 * tail[k + 1] < 0.95


def test_the_interval_covers_the_median_of_skewed_values_as_often_as_it_says():
    samples = np.random.default_rng(0).exponential(size=(4000, 15))
    level = median_interval(samples[0])[2]
    covered = [low <= math.log(2) <= high for low, high, _ in map(median_interval, samples)]
    # Standard deviation of the share: sqrt(0.965 * 0.035 / 4000) = 0.003; four of them.
    assert np.mean(covered) == pytest.approx(level, abs=0.012)


def test_every_side_is_as_often_at_every_place_and_each_order_is_followed_by_its_reverse():
    for place in range(len(SIDES)):
        assert sorted(order[place] for order in ORDERS) == [0, 0, 1, 1, 2, 2]
    for order, reverse in zip(ORDERS[::2], ORDERS[1::2]):
        assert order == reverse[::-1]


@pytest.mark.soak
def test_all_sides_of_a_step_are_taken_and_reported(monkeypatch, capsys):
    config = tiny_config()
    monkeypatch.setattr(critical_path.quickstart, "get_config", lambda: config)
    monkeypatch.setattr("sys.argv", ["critical_path", "--pairs=1", "--warmup=0"])
    critical_path.main()
    said = capsys.readouterr().out
    for side in ("streamed", "no states"):
        assert f"step time, metrics / {side} |" in said
    assert "Metrics alone:" in said
