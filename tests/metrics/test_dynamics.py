"""Velocity and acceleration over growing prefixes."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax import metrics
from semrl_jax.metrics.windows import chunks, summarise
from tests.oracles import metrics as oracle

seeds = st.integers(0, 2**31 - 1)


def dynamics(window="exact", stride=4, method="svd"):
    return _dynamics(window, stride, method)


@functools.cache
def _dynamics(window, stride, method):
    return jax.jit(
        functools.partial(metrics.rank_dynamics, window=window, stride=stride, method=method)
    )


def orders_of(values):
    """First and second order of a series, all of it valid."""
    result = jax.jit(summarise)(np.asarray(values, np.float32), np.int32(len(values)))
    return [float(x) for x in result]


def expect(rows, stride, window):
    values = oracle.series(oracle.effective_rank, rows, stride, window)
    velocity, acceleration = oracle.orders(values)
    return oracle.effective_rank(rows), velocity or 0.0, acceleration or 0.0


def test_orders_grow_as_derived():
    j = np.arange(1, 2001)
    for p in (1.0, 0.5):  # m = c j^p: ERV ~ c K^p p / (p + 1)^2, ERA ~ c K^(p - 1) p / (p + 1)
        velocity, acceleration = orders_of(3.0 * j**p)
        # 2e-2: the finite K of an asymptotic law; float32 adds 1e-4.
        np.testing.assert_allclose(velocity, 3.0 * 2000**p * p / (p + 1) ** 2, rtol=2e-2)
        np.testing.assert_allclose(acceleration, 3.0 * 2000 ** (p - 1) * p / (p + 1), rtol=4e-2)
    velocity, acceleration = orders_of(3.0 * np.log(j))
    np.testing.assert_allclose(velocity, 3.0, rtol=2e-2)  # bounded by c
    assert abs(acceleration) < 3e-3  # of order 1 / K


@pytest.mark.parametrize(
    "window, method",
    [
        ("exact", "gram"),
        ("release", "svd"),
        pytest.param("later", "svd", marks=pytest.mark.slow),
        pytest.param("exact", "svd", marks=pytest.mark.soak),
        pytest.param("release", "gram", marks=pytest.mark.soak),
        pytest.param("later", "gram", marks=pytest.mark.soak),
    ],
)
@given(seed=seeds, num_tokens=st.integers(0, 26), holes=st.booleans())
def test_rank_dynamics_match_float64(window, method, seed, num_tokens, holes):
    rng = np.random.default_rng(seed)
    states = np.full((26, 16), np.nan, np.float32)
    where = np.sort(rng.permutation(26)[:num_tokens]) if holes else np.arange(num_tokens)
    states[where] = rng.normal(size=(num_tokens, 16)) + rng.normal(size=16) * 30
    mask = np.isin(np.arange(26), where)
    actual = dynamics(window, method=method)(states, mask)
    # svd: 1e-5 of ER of at most 13, over up to 6 windows. gram: 1e-3, as documented.
    tolerance = 2e-5 if method == "svd" else 1e-3
    expected = expect(states[where], 4, window)
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("num_tokens", [511, 513, 560, 600])
def test_release_looks_at_the_last_512_tokens(num_tokens):
    states = np.random.default_rng(0).normal(size=(600, 6)).astype(np.float32)
    states *= np.linspace(0.1, 3, 600, dtype=np.float32)[:, None] ** np.arange(6)
    actual = dynamics("release", stride=80)(states, np.arange(600) < num_tokens)
    expected = expect(states[:num_tokens], 80, "release")
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("method", [pytest.param("gram", marks=pytest.mark.slow), "svd"])
def test_more_windows_than_are_unrolled(method):
    states = np.random.default_rng(0).normal(size=(40, 10)).astype(np.float32)
    for num_tokens in (40, 33):
        actual = dynamics(stride=1, method=method)(states, np.arange(40) < num_tokens)
        expected = expect(states[:num_tokens], 1, "exact")
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)


@given(num_windows=st.integers(0, 100))
def test_every_window_is_in_one_chunk(num_windows):
    runs = chunks(num_windows, most=16)
    assert [i for start, stop in runs for i in range(start, stop)] == list(range(num_windows))
    assert len(runs) <= 16
