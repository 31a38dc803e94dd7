"""Padded sizes of arrays, so that few programs are compiled."""


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`; 1 below 2."""
    return 1 << max(number - 1, 0).bit_length()


def next_size(number: int, smallest: int) -> int:
    """The least of 1, 1.5, 2, 3, 4, ... times `smallest`, a power of two, from `number` on."""
    size = smallest * next_power_of_two(-(-number // smallest))
    between = size // 4 * 3
    return between if smallest < number <= between else size
