"""The series that velocity and acceleration are made of."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax import metrics
from tests.cases import slow_after
from tests.oracles import metrics as oracle


@given(
    num_tokens=st.integers(0, 1100), stride=st.integers(1, 300),
    window=st.sampled_from(metrics.WINDOWS),
)  # fmt: skip
def test_windows_are_counted_as_the_oracle_takes_them(num_tokens, stride, window):
    series = oracle.series(len, np.zeros((num_tokens, 1)), stride, window)
    assert metrics.count_windows(num_tokens, stride, window) == len(series)


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
