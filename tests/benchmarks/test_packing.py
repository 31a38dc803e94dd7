"""The benchmark of packing counts what it says."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import packing


def test_compilations_are_counted_by_program():
    @jax.jit
    def doubled(x):
        return 2 * x

    with packing.counted() as programs:
        for size in (3, 5, 3):
            doubled(jnp.zeros(size))
    assert programs["doubled"] == 2
    doubled(jnp.zeros(7))
    assert programs["doubled"] == 2


@pytest.mark.slow
def test_a_learner_compiles_no_more_often_than_there_are_shapes_of_rows():
    text = packing.compilations(num_responses=16, num_steps=6)
    for side in packing.SIDES:
        (row,) = (line for line in text.splitlines() if line.startswith(f"| {side} |"))
        shapes, most, _ = (int(cell) for cell in row.split("|")[2:5])
        assert 1 <= most <= shapes
