"""Responses whose rank grows by a law, and their correlations."""

import numpy as np
import pytest

from benchmarks import window_growth
from semrl_jax.analysis.responses import RANKS
from tests.oracles import metrics as oracle


@pytest.mark.parametrize("law", window_growth.LAWS)
def test_directions_grow_by_the_law(law):
    options = {"num_tokens": 400, "rate": 20 / window_growth.LAWS[law](400), "width": 32}
    rows = window_growth.growing_states(law, **options, rng=np.random.default_rng(0))
    assert rows.shape == (400, 32) and rows.dtype == np.float32
    used = [np.flatnonzero(row)[-1] + 1 for row in rows]
    expected = {"linear": 10, "square root": 20 / 2**0.5, "logarithm": 20 * 5.3 / 6.0}[law]
    assert used[-1] == 20 and abs(used[199] - expected) <= 1
    ranks = [oracle.effective_rank(rows[:n]) for n in (100, 400)]
    assert 0.4 * used[-1] < ranks[1] < used[-1] and ranks[0] < ranks[1]


@pytest.mark.soak
def test_a_study_of_growth_has_every_source_and_shows_the_cap():
    found = window_growth.growth_study(num_responses=8, max_tokens=1200, stride=100)
    sources = (*window_growth.LAWS, window_growth.WIDE, window_growth.SAMPLED)
    assert [(c.source, c.window) for c in found] == [
        (source, window) for source in sources for window in ("exact", "release", "later")
    ]
    linear, wide = (
        {c.window: c for c in found if c.source == s} for s in ("linear", window_growth.WIDE)
    )
    assert linear["exact"].r(1) > 0.95
    # The rank grows less over the last 512 of up to 1200 tokens than over all of them.
    longest = np.argmax(wide["exact"].table["length"])
    capped, whole = (wide[name].table[RANKS[1]][longest] for name in ("release", "exact"))
    assert capped < 0.8 * whole
    (sampled,) = (c for c in found if (c.source, c.window) == (window_growth.SAMPLED, "exact"))
    assert np.ptp(sampled.table[RANKS[0]]) > 1
    again = window_growth.sampled_states(num_responses=4, num_tokens=64)
    np.testing.assert_array_equal(
        again[0], window_growth.sampled_states(num_responses=4, num_tokens=64)[0]
    )
