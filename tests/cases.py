"""Parameters of a test of which the first run in the fast suite, and calls that are refused."""

from collections.abc import Callable, Iterable

import pytest

from semrl_jax.support.errors import UserError


def slow_after(count: int, cases: Iterable) -> list:
    """The same parameters; those after the first `count` are marked slow."""
    cases = list(cases)
    rest = [case if isinstance(case, tuple) else (case,) for case in cases[count:]]
    return [*cases[:count], *(pytest.param(*case, marks=pytest.mark.slow) for case in rest)]


def refused(message: str, call: Callable, /, *arguments, **options) -> str:
    """The call raises a UserError of one line, in which the pattern is found; returns the line."""
    with pytest.raises(UserError, match=message) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def raised(
    kind: type[BaseException], message: str, call: Callable, /, *arguments, **options
) -> None:
    """The call raises an exception of this kind, in which the pattern is found."""
    with pytest.raises(kind, match=message):
        call(*arguments, **options)
