"""Slices by name, and mistakes in their names."""

import pytest

from semrl_jax.planning.chips import CHIPS, find_slice, smallest_that_holds
from semrl_jax.support.errors import UserError


def test_a_slice():
    found = find_slice("v5p:4x4x4")
    assert (found.num_chips, found.shape, found.hbm_bytes) == (64, (4, 4, 4), 64 * 95e9)


def test_links_of_a_chip():
    # "How to scale your model", table of TPU specifications: 4.5e10 for v5e, 9e10 for v5p and v6e.
    found = {name: chip.link_bandwidth for name, chip in CHIPS.items()}
    assert found == {"v5e": 4.5e10, "v5p": 9e10, "v6e": 9e10}


def test_rings_are_closed_where_the_pod_closes_them():
    assert CHIPS["v5p"].has_ring(4) and CHIPS["v5p"].has_ring(8) and not CHIPS["v5p"].has_ring(2)
    assert CHIPS["v5e"].has_ring(16) and not CHIPS["v5e"].has_ring(8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v9:2x2", "one of v5e, v5p, v6e"),
        ("v5p", "v5p slices have the shapes 2x2x1"),
        ("v5p:4x4x5", "the shapes .*4x4x4"),
        ("v5e:../x", "v5e slices have the shapes"),
    ],
)
def test_an_unknown_slice_is_refused_with_the_known_ones(text, message):
    with pytest.raises(UserError, match=message):
        find_slice(text)


def test_what_would_hold_a_model():
    assert smallest_that_holds(100e9) == ["v5e:2x4", "v5p:2x2x1", "v6e:2x2"]
    assert smallest_that_holds(1e15) == []
