"""Powers of two by hand."""

from semrl_jax.rounding import next_power_of_two


def test_next_power_of_two_is_the_smallest_that_holds():
    numbers = (0, 1, 2, 3, 4, 5, 8, 9, 2**20, 2**20 + 1)
    assert [next_power_of_two(n) for n in numbers] == [1, 1, 2, 4, 4, 8, 8, 16, 2**20, 2**21]
