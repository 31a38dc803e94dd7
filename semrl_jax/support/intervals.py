"""Intervals of numbers as texts: "[0, 1)", "(0, inf)"."""

from __future__ import annotations


def is_within(value: float, interval: str) -> bool:
    """Whether the number is in the interval; NaN is in none."""
    low, high = map(float, interval[1:-1].split(", "))
    is_above = value >= low if interval[0] == "[" else value > low
    return is_above and (value <= high if interval[-1] == "]" else value < high)


def in_words(interval: str) -> str:
    """The rule of an interval: "in [0, 1)"; of "[0, inf)": "finite and at least 0"."""
    if not interval.endswith(", inf)"):
        return f"in {interval}"
    low = interval[1:].partition(",")[0]
    return f"finite and {'at least' if interval[0] == '[' else 'above'} {low}"
