"""Rows of very different size: what vanishes in float32 must not count as measured."""

import functools
import itertools

import jax
import numpy as np
import pytest

from semrl_jax import metrics
from tests.metrics.flat import flat_metrics
from tests.metrics.test_dynamics import expect
from tests.oracles import metrics as oracle


@pytest.mark.slow
def test_equal_rows_of_any_size_have_rank_one_and_a_line_no_minus_zero():
    # From 1.7e30 on, 1e-8 divided by the scale is zero.
    states = np.ones((6, 4, 3), np.float32)
    states[:5] *= np.float32([1e-42, 1e-30, 1.0, 2e30, 3e38])[:, None, None]
    states[5] *= np.arange(4, dtype=np.float32)[:, None]
    found = flat_metrics(states, np.ones((6, 4), bool), stride=1)
    assert np.all(found["effective_rank_velocity_valid"])
    np.testing.assert_array_equal(found["effective_rank"][:5], 1.0)
    for name, value in found.items():
        assert np.all(np.isfinite(value)), name
    # Zero, not minus zero, which would print as "-0".
    for name in ("log_effective_rank", "response_entropy"):
        np.testing.assert_allclose(found[name], 0.0, atol=1e-5)
        assert not np.any(np.signbit(found[name])), name


def test_a_huge_first_row_does_not_round_the_others():
    # With stride 1, it is the first prefix, whose mean is subtracted.
    measure = functools.partial(metrics.rank_dynamics, stride=1, method="gram")
    for seed, factor in itertools.product(range(6), (80, 100)):
        rows = np.random.default_rng(seed).normal(size=(56, 64)).astype(np.float32)
        rows[0] *= factor
        found = measure(rows, np.ones(len(rows), bool)).effective_rank
        # The documented error. Without a check of the offset it is up to 4e-3.
        np.testing.assert_allclose(found, oracle.effective_rank(rows), rtol=1e-3)


def far_tail(seed=0):
    """Rows of which the last 512 are of rank 3 and a ten-millionth of the others."""
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(640, 8))
    states[-512:] = rng.normal(size=(512, 3)) @ rng.normal(size=(3, 8)) * 1e-7
    return states.astype(np.float32)


def outlier_first(seed=0):
    """Rows after one that float64 cannot add to the others."""
    states = np.random.default_rng(seed).normal(size=(640, 8)).astype(np.float32)
    states[0] *= np.float32(1e15)
    return states


@pytest.mark.parametrize("method", metrics.METHODS)
def test_rows_before_the_window_do_not_round_those_in_it(method):
    dynamics = jax.jit(
        functools.partial(metrics.rank_dynamics, stride=100, window="release", method=method)
    )
    for rows in (far_tail(), outlier_first()):
        found = dynamics(rows, np.ones(640, bool))
        # 1e-4 of differences of ranks near 7.
        np.testing.assert_allclose(found[1:3], expect(rows, 100, "release")[1:], atol=1e-4)


def beside_one_column(size):
    states = np.random.default_rng(0).normal(size=(40, 12)).astype(np.float32)
    states[:, 0] = size
    return states


@pytest.fixture(scope="module")
def by_gram():
    return functools.partial(flat_metrics, stride=20, orders=("effective_rank",))


@pytest.mark.parametrize("size", [1e15, 1e19, 1e20, 1e30])
@pytest.mark.parametrize("names", [metrics.RELEASE_METRICS, ("effective_rank",)])
def test_a_huge_offset_hides_no_difference(by_gram, names, size):
    # Squares of differences, 1e-38 of the largest entry's, vanish in float32.
    rows = beside_one_column(size)
    found = by_gram(rows[None], np.ones((1, 40), bool), names=names)
    for name in names:
        np.testing.assert_allclose(
            found[name][0], oracle.METRICS[name](rows), rtol=2e-5, err_msg=name
        )
    velocity = expect(rows, 20, "exact")[1]
    np.testing.assert_allclose(found["effective_rank_velocity"][0], velocity, rtol=1e-4)


def gram_series(states, stride):
    """ER of the prefixes by "gram"."""
    mask, names = np.ones((1, len(states)), bool), ("effective_rank",)
    options = {"stride": stride, "method": "gram", "names": names, "series": names}
    found = metrics.hidden_state_metrics(states[None], mask, **options)
    return np.asarray(found[metrics.MetricKey(*names, "series")].value[0])


@pytest.mark.slow
def test_prefixes_before_the_rows_grow_are_measured():
    states = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    states[20:] *= np.float32(1e20)
    series = oracle.series(oracle.effective_rank, states, 10, "exact")
    np.testing.assert_allclose(gram_series(states, 10), series, rtol=1e-5)


def one_direction(rng, num_rows, width, share):
    """Rows of which all directions but the first are `share` of it."""
    u = np.linalg.qr(rng.normal(size=(num_rows, num_rows)))[0]
    v = np.linalg.qr(rng.normal(size=(width, num_rows)))[0]
    return (u * np.append(1.0, np.full(num_rows - 1, share))) @ v.T


def is_resolved(states):
    """Whether float32 resolves the spectrum of all rows."""
    sigma = oracle.singular_values(states)[: min(len(states) - 1, states.shape[1])]
    return sigma[-1] > 2e-3 * sigma[0]


def test_one_prefix_that_float32_does_not_resolve_takes_float64():
    rng = np.random.default_rng(0)
    rows = np.concatenate([one_direction(rng, 12, 20, 3e-4), rng.normal(size=(24, 20))])
    rows = rows.astype(np.float32)
    assert is_resolved(rows)
    exact = oracle.series(oracle.effective_rank, rows, 12, "exact")
    # Float32 alone is 4 % off in the first.
    np.testing.assert_allclose(gram_series(rows, 12), exact, rtol=1e-4)


@pytest.mark.slow
def test_the_last_prefix_alone_takes_float64():
    # The 56th row is huge, and those after the last prefix, of 60 rows, are too.
    rng = np.random.default_rng(0)
    states = rng.normal(size=(69, 6)).astype(np.float32)
    states[55] *= 5e4
    states[60:] *= 5e4
    assert is_resolved(states)
    exact = oracle.series(oracle.effective_rank, states, 10, "exact")
    assert exact[-1] > 1.002  # float32 alone: 1
    np.testing.assert_allclose(gram_series(states, 10), exact, rtol=1e-4)


def test_a_wide_rank_is_counted_in_float64_near_its_threshold():
    # max(T, D) eps is 2.4e-3 here, so that float32 may not count what lies above 1e-3.
    rng, width = np.random.default_rng(0), 20_000
    threshold = width * oracle.EPS32
    sigma = np.append([1.0], threshold * np.linspace(0.997, 1.003, 40))
    # Directions of mean zero, so that centring leaves these singular values.
    u = np.linalg.qr(np.append(np.ones((42, 1)), rng.normal(size=(42, 41)), axis=1))[0][:, 1:]
    v = np.linalg.qr(rng.normal(size=(width, 41)))[0]
    states = ((u * sigma) @ v.T * 99).astype(np.float32)
    rank = oracle.traditional_rank(states)
    assert 10 < rank < 31  # some above, some below
    found = flat_metrics(
        states[None], np.ones((1, 42), bool), stride=50, names=("traditional_rank",)
    )
    assert found["traditional_rank"][0] == rank


def test_subnormal_entries_count_as_zero():
    states = (np.random.default_rng(0).normal(size=(8, 4)) * 1e-42).astype(np.float32)
    assert np.any(states)
    assert metrics.traditional_rank(states, np.ones(8, bool)) == 0.0


@pytest.mark.slow
def test_gradients_of_metrics_are_zero():
    states, mask = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32), np.ones(9, bool)
    straight = np.arange(9, dtype=np.float32)[:, None] * np.ones(4, np.float32)
    for rows in (states, straight):  # of the angle alone it would be NaN on a straight line
        np.testing.assert_array_equal(jax.grad(metrics.curvature)(rows, mask), 0.0)
    assert not np.any(jax.grad(metrics.effective_rank)(states, mask))

    def total(states):
        found = flat_metrics(states[None], mask[None], stride=3, names=("effective_rank",))
        return found["effective_rank_velocity"][0]

    assert not np.any(jax.grad(total)(states))


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [0, 7])
def test_results_are_32_bits_where_64_are_enabled(num_tokens):
    states, mask = np.ones((num_tokens, 3), np.float32), np.ones(num_tokens, bool)
    with jax.enable_x64(True):
        found = flat_metrics(
            states[None], mask[None], stride=2, window="later", series=("effective_rank",)
        )
        found |= metrics.rank_dynamics(states, mask, stride=2, window="later")._asdict()
        found["curvature"] = metrics.curvature(states, mask)
    for name, value in found.items():
        assert value.dtype == (bool if name.endswith("_valid") else np.float32), name
