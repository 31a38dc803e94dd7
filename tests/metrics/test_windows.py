"""The series that velocity and acceleration are made of."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax import metrics
from tests.oracles import metrics as oracle


@given(
    num_tokens=st.integers(0, 1100), stride=st.integers(1, 300),
    window=st.sampled_from(metrics.WINDOWS),
)  # fmt: skip
def test_windows_have_the_sizes_that_the_oracle_takes(num_tokens, stride, window):
    expected = oracle.series(len, np.zeros((num_tokens, 1)), stride, window)
    assert metrics.window_sizes(num_tokens, stride, window) == expected
