"""Parameters of a test of which the first run in the fast suite."""

from collections.abc import Iterable

import pytest


def slow_after(count: int, cases: Iterable) -> list:
    """The same parameters; those after the first `count` are marked slow."""
    cases = list(cases)
    rest = [case if isinstance(case, tuple) else (case,) for case in cases[count:]]
    return [*cases[:count], *(pytest.param(*case, marks=pytest.mark.slow) for case in rest)]
