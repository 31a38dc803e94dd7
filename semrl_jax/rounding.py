"""Padded sizes of arrays, so that few programs are compiled."""


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`; 1 below 2."""
    return 1 << max(number - 1, 0).bit_length()
