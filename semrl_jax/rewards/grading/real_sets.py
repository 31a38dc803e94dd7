"""Sets of real numbers: inequalities of one variable, intervals, unions, and finite sets.

All numbers at which a set may begin or end are known, so two sets are equal if they agree at these
and between them. An inequality that must be solved first, such as x^2 - 3x + 2 < 0, is no set here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import mpmath

from semrl_jax.rewards.grading import expressions, relations
from semrl_jax.rewards.grading.splitting import at_top_level, bracketed, condition

MAX_PIECES = 12
_OR = re.compile(r"\\cup(?![a-zA-Z])|\\text\s*\{\s*or\s*\}|\\(?:lor|vee)(?![a-zA-Z])|\bor\b|或")
_AND = re.compile(
    r"\\cap(?![a-zA-Z])|\\text\s*\{\s*and\s*\}|\\(?:land|wedge)(?![a-zA-Z])|\band\b|且"
    r"|,(?=[^,]*\\neq)"
)
_WITHOUT = re.compile(r"\\(?:setminus|backslash|smallsetminus)(?![a-zA-Z])")
_MEMBER = re.compile(r"(\\?[a-zA-Z]+(?:_\w)?)\s*\\in(?![a-zA-Z])(.*)")
_INFINITY = {r"\infty": 1, r"-\infty": -1, r"- \infty": -1}
_COMPARE: dict[str, Callable[[int], bool]] = {
    "<": lambda sign: sign < 0, ">": lambda sign: sign > 0, "=": lambda sign: sign == 0,
    r"\leq": lambda sign: sign <= 0, "<=": lambda sign: sign <= 0,
    r"\geq": lambda sign: sign >= 0, ">=": lambda sign: sign >= 0,
    r"\neq": lambda sign: sign != 0,
}  # fmt: skip


class RealSet(NamedTuple):
    """A set of real numbers."""

    contains: Callable[[Any], bool]  # whether a number, a Fraction or of mpmath, is in the set
    ends: tuple[Any, ...]  # all numbers at which the set may begin or end
    name: str = ""  # of the variable; "" if none is written


def as_real_set(text: str) -> RealSet | None:
    """The set that a normalised answer describes; None if it is no set or has a parameter."""
    text = condition(text)
    if member := _MEMBER.fullmatch(text):
        found = as_real_set(member[2].strip())
        return found and found._replace(name=member[1])

    def without(memberships: Any) -> bool:
        first, *others = memberships
        return first and not any(others)

    def combined(sets: list[RealSet], combine: Callable[[Any], bool]) -> Callable[[Any], bool]:
        return lambda x: combine(s.contains(x) for s in sets)

    for separator, combine in ((_OR, any), (_AND, all), (_WITHOUT, without)):
        pieces = at_top_level(text, separator)
        if 1 < len(pieces) <= MAX_PIECES:
            sets = [as_real_set(piece) for piece in pieces]
            names = {s.name for s in sets if s and s.name}
            if None in sets or len(names) > 1:
                return None
            ends = tuple(end for s in sets for end in s.ends)
            return RealSet(combined(sets, combine), ends, *names)
    return _interval(text) or _finite(text) or _inequality(text)


def equal(a: RealSet, b: RealSet) -> bool | None:
    """Whether both have the same numbers; None if that cannot be told."""
    if a.name and b.name and a.name != b.name:
        return False
    with mpmath.workdps(expressions.DIGITS):
        ends = sorted((*a.ends, *b.ends), key=expressions.inexact) or [Fraction(0)]
        numbers = [expressions.inexact(end) for end in ends]
        between = [(x + y) / 2 for x, y in itertools.pairwise(numbers)]
        outside = [2 * numbers[0] - numbers[-1] - 1, 2 * numbers[-1] - numbers[0] + 1]
        try:
            return all(a.contains(x) is b.contains(x) for x in (*ends, *between, *outside))
        except expressions.NO_VALUE:
            return None


def _interval(text: str) -> RealSet | None:
    brackets, content = bracketed(text) or ("", "")
    items = at_top_level(content, re.compile(","))
    if brackets not in ("()", "(]", "[)", "[]") or len(items) != 2:
        return None
    low, high = (_INFINITY.get(item) or expressions.constant(item) for item in items)
    ends = [end for end, item in zip((low, high), items) if item not in _INFINITY]
    if None in (low, high):
        return None

    def contains(x: Any) -> bool:
        above = items[0] == r"-\infty" or _sign(x, low) > (-1 if brackets[0] == "[" else 0)
        below = items[1] == r"\infty" or _sign(x, high) < (1 if brackets[1] == "]" else 0)
        return above and below

    return RealSet(contains, tuple(ends))


def _finite(text: str) -> RealSet | None:
    if text == r"\emptyset":
        return RealSet(lambda x: False, ())
    brackets, content = bracketed(text) or ("", "")
    if brackets != "{}":
        return None
    numbers = tuple(map(expressions.constant, at_top_level(content, re.compile(","))))
    if None in numbers or len(numbers) > MAX_PIECES:
        return None
    return RealSet(lambda x: any(_sign(x, number) == 0 for number in numbers), numbers)


def _inequality(text: str) -> RealSet | None:
    """A relation, or a chain of them, between expressions of one variable."""
    parts, signs = relations.sides(text)
    trees = [part if (tree := expressions.parse(part)) is None else tree for part in parts]
    if not signs or len(signs) > 3 or any(sign not in _COMPARE for sign in signs):
        return None
    if any(isinstance(tree, str) and tree not in _INFINITY for tree in trees):
        return None
    symbols = {s.name for t in trees if not isinstance(t, str) for s in t.free_symbols}
    names = symbols - {expressions.EULER}
    if len(names) != 1:
        return None
    (name,) = names
    ends: list[Any] = []
    for pair in itertools.pairwise(parts):
        if pair[0] in _INFINITY or pair[1] in _INFINITY:
            continue
        constants = [expressions.constant(part) for part in pair]
        found = None
        if constants.count(None) == 1:
            at = constants.index(None)
            found = _where(expressions.parse(pair[at]), name, constants[1 - at])
        if found is None:
            return None
        ends += found

    def side(tree: Any, x: Any) -> Any:
        if isinstance(tree, str):
            return _INFINITY[tree] * 10**30
        return expressions.value(tree, {name: x})

    def contains(x: Any) -> bool:
        try:
            values = [side(tree, x) for tree in trees]
        except expressions.NO_VALUE:
            return False
        return all(
            _COMPARE[sign](_sign(first, second))
            for sign, first, second in zip(signs, values, values[1:])
        )

    return RealSet(contains, tuple(ends), name)


def _where(tree: Any, name: str, target: Any) -> list[Any] | None:
    """The numbers at which ax + b, its size or its square has a value; None for other functions."""
    kind = type(tree).__name__
    if kind == "Abs" or (kind == "Pow" and tree.args[1] == 2):
        with mpmath.workdps(expressions.DIGITS):
            if target < 0:
                return []
            size = target if kind == "Abs" else mpmath.sqrt(expressions.inexact(target))
            found = [_where(tree.args[0], name, each) for each in (size, -size)]
        return None if None in found else found[0] + found[1]
    if expressions.degree(tree) != 1:
        return None
    with mpmath.workdps(expressions.DIGITS):
        try:
            start, one = (expressions.value(tree, {name: Fraction(x)}) for x in (0, 1))
            return [(expressions.inexact(target) - start) / (expressions.inexact(one) - start)]
        except expressions.NO_VALUE:
            return None


def _sign(a: Any, b: Any) -> int:
    """-1, 0 or 1: how a compares with b to 25 digits; ValueError if one is not real."""
    if isinstance(a, (Fraction, int)) and isinstance(b, (Fraction, int)):
        return (a > b) - (a < b)
    a, b = expressions.inexact(a), expressions.inexact(b)
    if mpmath.im(a) or mpmath.im(b):
        raise ValueError("not real")
    distance = mpmath.re(a) - mpmath.re(b)
    if abs(distance) <= mpmath.mpf(10) ** -25 * max(abs(a), abs(b)):
        return 0
    return 1 if distance > 0 else -1
