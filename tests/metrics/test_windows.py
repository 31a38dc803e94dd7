"""Windows left out and interpolated, and the series the orders are made of."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax import metrics
from semrl_jax.metrics.windows import interpolated, measured_windows
from tests.cases import slow_after
from tests.metrics.flat import flat_metrics
from tests.oracles import metrics as oracle


@given(num_windows=st.integers(0, 120), growth=st.floats(1, 4))
def test_measured_windows_are_the_first_four_and_then_grow(num_windows, growth):
    found = measured_windows(num_windows, growth)
    assert found[:4] == tuple(range(min(num_windows, 4)))
    numbers = [index + 1 for index in found[3:]]
    for number, following in itertools.pairwise(numbers):
        assert following == max(number + 1, int(number * growth))
    if found:  # none is left out at the end
        assert max(found[-1] + 2, int((found[-1] + 1) * growth)) > num_windows
    assert measured_windows(num_windows, 1.0) == tuple(range(num_windows))


@given(
    num_tokens=st.integers(0, 1100), stride=st.integers(1, 300),
    window=st.sampled_from(metrics.WINDOWS),
)  # fmt: skip
def test_windows_are_counted_as_the_oracle_takes_them(num_tokens, stride, window):
    series = oracle.series(len, np.zeros((num_tokens, 1)), stride, window)
    assert metrics.count_windows(num_tokens, stride, window) == len(series)


@functools.cache
def filled(measured, length):
    return jax.jit(lambda *arrays: interpolated(*arrays[:2], measured, arrays[2], length))


LAWS = {
    "constant": lambda j: np.ones_like(j),
    "logarithm": np.log,
    "cube of the logarithm": lambda j: np.log(j) ** 3,
    "square root": np.sqrt,
    "linear": lambda j: j,
}


@pytest.mark.slow
@pytest.mark.parametrize("law", slow_after(2, LAWS))
@pytest.mark.parametrize(
    "growth", [pytest.param(g, marks=pytest.mark.soak) for g in (1.25, 2.0)] + [1.5]
)
@given(num_windows=st.integers(1, 60))
def test_series_that_grow_like_a_metric_are_filled_in(law, growth, num_windows):
    measured = measured_windows(60, growth)
    series = LAWS[law](np.arange(1.0, 61)).astype(np.float32)
    values = np.where(np.array(measured) < num_windows, series[list(measured)], np.nan)
    last = series[num_windows - 1 : num_windows]
    actual = filled(measured, 60)(values[:, None], last, jnp.int32(num_windows))[:, 0]
    known = [index for index in (*measured, num_windows - 1) if index < num_windows]
    np.testing.assert_allclose(actual[jnp.array(known)], series[known], rtol=1e-5, atol=1e-6)
    # Cubics in log j are exact up to float32; the others' fourth derivative costs growth^4.
    tolerance = (
        {1.25: 2e-4, 1.5: 1.5e-3, 2.0: 7e-3}[growth] if law in ("square root", "linear") else 2e-5
    )
    np.testing.assert_allclose(
        actual[:num_windows], series[:num_windows], rtol=tolerance, atol=tolerance
    )


def responses():
    """Rows that wander, so that their rank grows with the prefix, and lengths of responses."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3, 200, 48)) * np.geomspace(1, 1e-2, 48)
    states = np.cumsum(rows, axis=1) * 0.2 + rows
    mask = np.arange(200) < np.array([200, 150, 23])[:, None]
    return states.astype(np.float32), mask


@pytest.mark.slow
@pytest.mark.parametrize("window", ["exact", "later"])
def test_orders_hardly_move_when_windows_grow(window):
    states, mask = responses()
    measure = functools.partial(
        flat_metrics, states, mask, stride=6, window=window,
        names=("effective_rank", "curvature"),
    )  # fmt: skip
    every, grown = measure(), measure(window_growth=1.25)
    for key in every:
        # The interpolation's own error on such noisy rows, beside ERV of 6 and ERA of .1 to 1.5;
        # values and curvature are untouched.
        near = {"rtol": 6e-3, "atol": 2e-3} if "rank_" in key else {"rtol": 1e-6}
        np.testing.assert_allclose(grown[key], every[key], **near, err_msg=key)
    assert np.all(grown["effective_rank_acceleration_valid"][:2])
    assert np.any(grown["effective_rank_velocity"] != every["effective_rank_velocity"])


@pytest.mark.parametrize("window", metrics.WINDOWS)
@pytest.mark.parametrize("num_tokens", slow_after(2, [23, 0, 5, 24]))
def test_rank_series_are_the_prefixes_of_the_orders(window, num_tokens):
    states = np.random.default_rng(0).normal(size=(30, 16)).astype(np.float32)
    found = metrics.rank_series(states, np.arange(30) < num_tokens, stride=4, window=window)
    expected = oracle.series(oracle.effective_rank, states[:num_tokens], 4, window)
    count = int(found.num_windows)
    assert count == len(expected)
    np.testing.assert_allclose(found.effective_rank[:count], expected, rtol=2e-5)
    assert not found.effective_rank[count:].any() and not found.num_tokens[count:].any()
    sizes = np.asarray(found.num_tokens[:count])
    assert np.all(np.diff(sizes) > 0) and (count == 0 or sizes[-1] <= num_tokens)
    for size, value in zip(sizes, found.effective_rank):
        np.testing.assert_allclose(oracle.effective_rank(states[:size]), value, rtol=2e-5)


@pytest.mark.parametrize("growth", [0.5, float("nan"), float("inf")])
def test_a_growth_that_is_none_is_refused(growth):
    with pytest.raises(ValueError, match=r"window_growth=.*at least 1"):
        metrics.rank_dynamics(
            np.ones((8, 4), np.float32), np.ones(8, bool), stride=2, window_growth=growth
        )
