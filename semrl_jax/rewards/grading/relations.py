"""Equations and inequalities as text: their sides, names on the left, and intervals."""

from __future__ import annotations

import re

from semrl_jax.rewards.grading.splitting import Parts

_RELATION = re.compile(r"\\(?:leq|geq|neq|in|approx|sim)(?![a-zA-Z])|[<>]=?|=")
_NAME = re.compile(
    r"\\?[a-zA-Z]+'*(?:_(?:\w|\{\w+\}))?(?:\^\{-1\})?(?:\(\s*\w+(?:\s*,\s*\w+)*\s*\))?"
    r"|\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\)"
    # Quantities of geometry: m\angle ABC, |AB|, \overline{AB}, [ABC]; and words.
    r"|m?\\(?:angle|triangle)\s*\w+|\|\s*[A-Z]{1,3}\s*\||\\(?:overline|vec|overrightarrow)\s*\{\w{1,2}\}|\[[A-Z]{3,4}\]"
    r"|\\text\s*\{[^{}]*\}(?:_\w)?|[a-zA-Z]{1,2}(?:\s*:\s*[a-zA-Z]{1,2})+"
)
_SIGNS = {"<": "<", ">": ">", r"\leq": "<=", "<=": "<=", r"\geq": ">=", ">=": ">="}
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
MAX_NAME_CHARS = 24


def sides(text: str) -> tuple[list[str], list[str]]:
    """The sides of a relation, and the signs between them."""
    signs = _RELATION.findall(text)
    return [side.strip() for side in _RELATION.split(text)], signs


def is_name(text: str) -> bool:
    """Whether a side only names the value: `x`, `f(x)`, `a_{n}`, `\\theta`."""
    return len(text) <= MAX_NAME_CHARS and _NAME.fullmatch(text) is not None


def without_names(a: str, b: str) -> tuple[str, str]:
    """The values of two answers without `x =` or `x \\in` before them.

    The name goes if both have the same, or if the other is no relation, or one that is an interval.
    """
    names, values = zip(named(a), named(b), strict=True)
    if names[0] == names[1]:
        return values
    for text, name in ((b, names[0]), (a, names[1])):
        if name and (sides(text)[1] and not as_interval(text)):
            return a, b
    return values


def named(text: str) -> tuple[str, str]:
    """Name and value of `x = 5` or `x \\in [1, 2]`; of other texts no name."""
    parts, signs = sides(text)
    if len(signs) != 1 or signs[0] not in ("=", r"\in", r"\approx") or not is_name(parts[0]):
        return "", text
    return parts[0].replace(" ", ""), parts[-1]


def results(text: str) -> list[str]:
    """The result of a chain of equations: 113 of `m + n = 100 + 13 = 113`.

    `\\sqrt{2} \\approx 1.414` has two results, which are both sides. A text that is no chain, and
    an equation such as `x^2 - y = 0`, have none.
    """
    parts, signs = sides(text)
    if not signs or set(signs) - {"=", r"\approx"} or "" in parts:
        return []
    if signs == ["="] and parts[1] == "0" and re.search("[a-zA-Z]", parts[0]):
        return []
    has_two = signs[-1] == r"\approx" and (len(signs) > 1 or not is_name(parts[0]))
    return parts[-2:] if has_two else parts[-1:]


def as_equation(text: str) -> tuple[str, str] | None:
    """Left and right of an equation with one sign."""
    parts, signs = sides(text)
    return (parts[0], parts[1]) if signs == ["="] else None


def as_chain(text: str) -> tuple[list[str], list[str]] | None:
    """The sides of a chain of inequalities from the smallest up, and `<` or `<=` between them."""
    parts, signs = sides(text)
    signs = [_SIGNS.get(sign, "") for sign in signs]
    if not signs or "" in signs or len({sign[0] for sign in signs}) > 1:
        return None
    if signs[0][0] == ">":
        parts, signs = parts[::-1], [_FLIPPED[sign] for sign in signs[::-1]]
    return parts, signs


def as_interval(text: str) -> Parts | None:
    """`-2 \\leq x < 7` as the interval `[-2, 7)`, `x > 2` as `(2, \\infty)`."""
    chain = as_chain(text)
    if chain is None:
        return None
    parts, signs = chain
    if len(parts) == 2 and is_name(parts[0]) != is_name(parts[1]):
        if is_name(parts[0]):
            parts, signs = [r"-\infty", *parts], ["<", *signs]
        else:
            parts, signs = [*parts, r"\infty"], [*signs, "<"]
    if len(parts) != 3 or not is_name(parts[1]):
        return None
    brackets = ("[" if signs[0] == "<=" else "(") + ("]" if signs[1] == "<=" else ")")
    return Parts(brackets, (parts[0], parts[2]))
