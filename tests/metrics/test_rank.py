"""Effective and traditional rank, entropy and curvature of one response."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax import metrics
from semrl_jax.metrics.valid_rows import compact
from tests.oracles import metrics as oracle

SPECTRAL = ("effective_rank", "log_effective_rank", "traditional_rank", "response_entropy")
NAMES = (*SPECTRAL, "curvature")
JITTED = {name: jax.jit(getattr(metrics, name)) for name in NAMES}
GRAM_RANK = jax.jit(lambda states, mask: metrics.effective_rank(states, mask, method="gram"))

seeds = st.integers(0, 2**31 - 1)


def spread(seed, num_rows, width, smallest=1e-2):
    """Rows whose singular values fall geometrically to `smallest` of the largest."""
    rng = np.random.default_rng(seed)
    rank = min(num_rows, width)
    u = np.linalg.qr(rng.normal(size=(num_rows, rank)))[0]
    v = np.linalg.qr(rng.normal(size=(width, rank)))[0]
    return ((u * np.geomspace(1, smallest, rank)) @ v.T * 3).astype(np.float32)


def test_curvature_skips_short_steps():
    # East, a pause, a step below 1e-6, north-west: one pair, 135 degrees.
    states = np.array([[0, 0], [1, 0], [1, 0], [1, 5e-7], [0, 1]], np.float32)
    actual = JITTED["curvature"](states, np.ones(5, bool))
    np.testing.assert_allclose(actual, 3 * np.pi / 4, rtol=1e-6)


def test_curvature_of_a_straight_line_is_zero():
    # The arccosine of a rounded cosine would read 3e-4 here.
    states = np.arange(40, dtype=np.float32)[:, None] * np.array([0.3, -0.7, 0.1], np.float32)
    assert JITTED["curvature"](states, np.ones(40, bool)) < 1e-5


@given(seed=seeds, num_tokens=st.integers(0, 24), holes=st.booleans())
def test_metrics_match_float64_whatever_surrounds_the_response(seed, num_tokens, holes):
    # Padding and holes are NaN. T <= 24 against D = 12: both sides of the square.
    rng = np.random.default_rng(seed)
    states = np.full((24, 12), np.nan, np.float32)
    where = np.sort(rng.permutation(24)[:num_tokens]) if holes else np.arange(num_tokens)
    states[where] = rng.normal(size=(num_tokens, 12)) * rng.uniform(0.1, 3, size=12)
    mask = np.zeros(24, bool)
    mask[where] = True
    for name in NAMES:
        expected = oracle.METRICS[name](states[where])
        # 1e-5: what a float32 decomposition of well-conditioned rows is good for.
        np.testing.assert_allclose(
            JITTED[name](states, mask), expected, rtol=1e-5, atol=1e-5, err_msg=name
        )


@given(seed=seeds, num_tokens=st.integers(2, 24))
def test_gram_matches_float64_above_its_floor(seed, num_tokens):
    states = np.zeros((24, 12), np.float32)
    states[:num_tokens] = spread(seed, num_tokens, 12, smallest=5e-3)
    actual = GRAM_RANK(states, np.arange(24) < num_tokens)
    # 1e-3: a rounding of the largest eigenvalue reaches an eigenvalue of 2.5e-5 as 0.5 %.
    np.testing.assert_allclose(actual, oracle.effective_rank(states[:num_tokens]), rtol=1e-3)


@pytest.mark.parametrize("shape", [(100, 160), (160, 100)])
def test_gram_measures_a_low_rank_despite_noise(shape):
    rng = np.random.default_rng(0)
    states = (rng.normal(size=(shape[0], 10)) @ rng.normal(size=(10, shape[1]))).astype(np.float32)
    mask = np.ones(shape[0], bool)
    expected = oracle.effective_rank(states)
    # Promised is 5e-2. Without a noise floor this reads 1.4 % more, and 5 % at 500 x 896.
    np.testing.assert_allclose(GRAM_RANK(states, mask), expected, rtol=1e-3)
    np.testing.assert_allclose(JITTED["effective_rank"](states, mask), expected, rtol=1e-5)
    assert JITTED["traditional_rank"](states, mask) == 10.0


@given(seed=seeds)
def test_rotation_and_scale_change_nothing(seed):
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(16, 8)).astype(np.float32)
    rotation = np.linalg.qr(rng.normal(size=(8, 8)))[0].astype(np.float32)
    mask = np.ones(16, bool)
    for name in NAMES:
        plain = JITTED[name](states, mask)
        # 1e-5: the rotation itself rounds. A factor 2^k rounds nothing; the two 1e-8 stay.
        np.testing.assert_allclose(JITTED[name](states @ rotation, mask), plain, rtol=1e-5)
        np.testing.assert_allclose(JITTED[name](states * 2.0**10, mask), plain, rtol=1e-6)


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**100])
def test_scales_at_the_ends_of_float32_stay_finite(factor):
    states = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    mask = np.ones(16, bool)
    large = factor > 1
    expected = oracle.METRICS if large else dict.fromkeys(NAMES, lambda rows: 0.0)
    for name in ("response_entropy", "curvature"):  # 1e-8 and 1e-6 end the small ones
        np.testing.assert_allclose(
            JITTED[name](states * np.float32(factor), mask), expected[name](states), rtol=1e-5
        )
    # Tiny states: every p_k is far below 1e-8, which makes the exponent 0 and the rank 1.
    rank = oracle.effective_rank(states) if large else 1.0
    scaled = states * np.float32(factor)
    np.testing.assert_allclose(JITTED["effective_rank"](scaled, mask), rank, rtol=1e-5)
    assert JITTED["traditional_rank"](scaled, mask) == 8.0


@given(seed=seeds)
def test_a_huge_mean_costs_no_accuracy(seed):
    states = np.random.default_rng(seed).normal(size=(16, 8)).astype(np.float32) + 3e4
    for name in NAMES:
        # The oracle gets the same rounded rows, so 2e-5 covers the arithmetic alone.
        actual = JITTED[name](states, np.ones(16, bool))
        np.testing.assert_allclose(actual, oracle.METRICS[name](states), rtol=2e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, 1234.567])
def test_equal_rows_have_effective_rank_one(value):
    states, mask = np.full((16, 8), value, np.float32), np.ones(16, bool)
    expected = {"effective_rank": 1.0}
    for name in NAMES:
        assert JITTED[name](states, mask) == expected.get(name, 0.0), name
    assert GRAM_RANK(states, mask) == 1.0


@pytest.mark.parametrize(
    "num_rows, num_tokens", [(0, 0), (1, 0), (1, 1), (2, 2), (3, 0), (3, 1), (3, 2), (3, 3)]
)
def test_short_responses_have_their_documented_values(num_rows, num_tokens):
    states = np.random.default_rng(1).normal(size=(num_rows, 4)).astype(np.float32)
    mask = np.arange(num_rows) < num_tokens
    for name in NAMES:
        expected = oracle.METRICS[name](states[:num_tokens])
        actual = JITTED[name](states, mask)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, err_msg=name)
    assert (num_tokens >= 2) == (JITTED["effective_rank"](states, mask) > 0)


@pytest.mark.parametrize("hostile", [np.nan, np.inf, -np.inf])
def test_a_non_finite_valid_row_gives_zero(hostile):
    states = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    states[3, 2] = hostile
    for name in NAMES:
        assert JITTED[name](states, np.ones(16, bool)) == 0.0
        assert JITTED[name](states, np.arange(16) != 3) > 0.0


def test_compact_rows_are_finite():
    # A decomposition of a non-finite matrix may never return.
    states = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    states[3, 2], states[9] = np.nan, np.inf
    for mask, finite in ((np.ones(16, bool), False), (np.arange(16) % 6 != 3, True)):
        rows = jax.jit(compact)(states, mask)
        assert rows.finite == finite
        assert np.all(np.isfinite(rows.states))
        assert np.any(rows.states) == finite


def test_bfloat16_is_computed_in_float32():
    states = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.bfloat16)
    rows = np.asarray(states, np.float64)
    for name in NAMES:
        actual = JITTED[name](states, np.ones(16, bool))
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, oracle.METRICS[name](rows), rtol=1e-5)


def test_states_of_another_length_of_response_do_not_retrace(caplog):
    # Outside jit, where a length could decide on a shape.
    states = np.ones((11, 3), np.float32)
    with jax.log_compiles():
        metrics.effective_rank(states, np.arange(11) < 2)
        assert "ompiling" in caplog.text
        caplog.clear()
        for num_tokens in (5, 11):
            metrics.effective_rank(states, np.arange(11) < num_tokens)
    assert not caplog.records
