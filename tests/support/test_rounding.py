"""Padded sizes by hand."""

from semrl_jax.support.rounding import next_power_of_two, next_size


def test_next_power_of_two_is_the_smallest_that_holds():
    numbers = (0, 1, 2, 3, 4, 5, 8, 9, 2**20, 2**20 + 1)
    assert [next_power_of_two(n) for n in numbers] == [1, 1, 2, 4, 4, 8, 8, 16, 2**20, 2**21]


def test_next_size_has_one_size_between_powers_of_two():
    found = [next_size(number, 4) for number in (0, 1, 4, 5, 6, 7, 8, 9, 12, 13, 17, 24, 25)]
    assert found == [4, 4, 4, 6, 6, 8, 8, 12, 12, 16, 24, 24, 32]
    assert [next_size(number, 1) for number in (1, 2, 3, 4, 5, 7)] == [1, 2, 3, 4, 6, 8]
