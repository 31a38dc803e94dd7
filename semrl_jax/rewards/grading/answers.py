"""Whether two answers are equal: text, numbers, parts, equations, then expressions."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from semrl_jax.rewards.grading import expressions, real_sets, relations, units
from semrl_jax.rewards.grading.numbers import Number, numbers_equal, parse_number
from semrl_jax.rewards.grading.splitting import Parts, at_top_level, bracketed, condition, split
from semrl_jax.rewards.grading.text import MAX_CHARS, is_words, same_text, split_unit

MAX_LEVELS = 4  # of parts in parts, such as a set of pairs
_BASE = re.compile(r"\(?(\d\w*)\)?_\{?(\d{1,2})\}?")
_COLON = re.compile(r"(?<=[^=]):(?!=)(?=.)")
_TIME = re.compile(
    r"(\d{1,2}):(\d\d)\s*(?:\\text\s*\{\s*)?(?:([ap])\.?\s?m\.?)?\s*\}?", re.IGNORECASE
)
_SET = re.compile(r"[<>]|\\(?:leq|geq|neq|cup|cap|setminus|backslash|in)(?![a-zA-Z])")


@functools.lru_cache(maxsize=8192)
def equal(answer: str, reference: str, *, percent: bool = False) -> bool:
    """Whether an answer equals a reference answer; the first rule that decides counts.

    1. The same text, but for spaces, fonts, units, currency and punctuation. Two known units must
       agree: 5 km is 5000 m, and not 5 m.
    2. Two numbers: see `numbers_equal`. Numbers to a base and times of day: the same digits.
    3. Inequalities, intervals and unions: the same real numbers, see `real_sets`. With parameters:
       the same interval, or the same sides in the same order.
    4. Tuples, intervals and matrices: the same brackets, and equal elements in the same order.
       Sets, lists and unions: equal elements in any order; `1 \\pm 2` has two.
    5. Equations: the same difference of the sides, but for a factor. `x = 5` and `5` are equal.
       The value of `m + n = 113` is 113; sides without names must agree.
    6. Words: never equal here, because rule 1 has compared them.
    7. Expressions: the same values, see `expressions_equal`.

    The answer is as the model wrote it, without a box, and the reference as the benchmark writes
    it. `percent`: see `numbers_equal`. An answer of more than 4096 characters is not equal. Hostile
    text may run long.
    """
    if max(len(answer), len(reference)) > MAX_CHARS:
        return False
    (answer, unit), (reference, reference_unit) = split_unit(answer), split_unit(reference)
    worths = units.worth(unit), units.worth(reference_unit)
    if worths[0] and worths[1] and worths[0] != worths[1]:
        numbers = parse_number(answer), parse_number(reference)
        if None in numbers or worths[0].dimensions != worths[1].dimensions:
            return False
        scaled = (number.scaled(worth.size) for number, worth in zip(numbers, worths))
        return numbers_equal(*scaled)
    return _equal(answer, reference, percent, MAX_LEVELS)


def _equal(answer: str, reference: str, percent: bool, levels: int) -> bool:
    answer, reference = _without_brackets(answer), _without_brackets(reference)
    if same_text(answer, reference):
        return True
    if not answer or not reference or levels == 0:
        return False
    numbers = _numbers(answer, reference)
    if None not in numbers:
        return numbers_equal(*numbers, percent=percent)
    if (found := _digits_equal(answer, reference)) is not None:
        return found
    compare = functools.partial(_equal, percent=percent, levels=levels - 1)
    ratios = at_top_level(answer, _COLON), at_top_level(reference, _COLON)
    if max(map(len, ratios)) > 1 and "=" not in answer + reference:
        return _ratios_equal(*ratios, compare)
    chains = relations.as_chain(answer), relations.as_chain(reference)
    if chains[0] and chains[1]:
        (sides, signs), (reference_sides, reference_signs) = chains
        if signs == reference_signs and _all_equal(sides, reference_sides, compare):
            return True
    if any(map(_SET.search, (answer, reference))):
        sets = real_sets.as_real_set(answer), real_sets.as_real_set(reference)
        if sets[0] and sets[1] and (found := real_sets.equal(*sets)) is not None:
            return found
    if chains[0] and chains[1]:
        return False
    values = relations.without_names(answer, reference)
    if values != (answer, reference) and compare(*values):
        return True
    parts = _parts(answer), _parts(reference)
    if parts[0] or parts[1]:
        return _parts_equal(
            parts[0] or Parts("", (answer,)), parts[1] or Parts("", (reference,)), compare
        )
    for text, other in ((answer, reference), (reference, answer)):
        is_result = text is answer or relations.is_name(relations.sides(text)[0][0])
        if is_result and not relations.sides(other)[1] and (found := _results(text, compare)):
            return any(compare(result, other) for result in found)
    if is_words(answer) or is_words(reference):
        return False
    equations = relations.as_equation(answer), relations.as_equation(reference)
    if equations[0] and equations[1]:
        return expressions.equations_equal(*equations)
    for number, other in zip(numbers, (reference, answer)):
        if number and number.place and (value := expressions.constant(other)) is not None:
            exact = Number(expressions.as_fraction(value))
            return numbers_equal(number, exact, percent=percent)
    return expressions.expressions_equal(answer, reference)


def _numbers(answer: str, reference: str) -> tuple[Number | None, Number | None]:
    """The numbers of both; words after one do not count if the other is a number."""
    numbers = parse_number(answer), parse_number(reference)
    if numbers[0] is None and numbers[1]:
        return parse_number(answer, with_words=True), numbers[1]
    if numbers[0] and numbers[1] is None:
        return numbers[0], parse_number(reference, with_words=True)
    return numbers


def _digits_equal(answer: str, reference: str) -> bool | None:
    """Whether numbers to a base or times of day are the same; None if the texts are others."""
    bases = _BASE.fullmatch(answer), _BASE.fullmatch(reference)
    if bases[0] and bases[1]:
        return bases[0].groups() == bases[1].groups()
    if bases[0] or bases[1]:
        return (bases[0] or bases[1])[1] in (answer, reference)
    times = _time_of_day(answer), _time_of_day(reference)
    if times[0] and times[1]:
        return all(x == y for x, y in zip(*times) if x and y)
    return None


def _ratios_equal(a: Sequence[str], b: Sequence[str], compare: Callable[[str, str], bool]) -> bool:
    """`2:4:6` is `1:2:3`, and `3:4` is three quarters."""
    if max(len(a), len(b)) == 2:
        return compare(*(rf"\frac{{{x[0]}}}{{{x[1]}}}" if len(x) == 2 else x[0] for x in (a, b)))
    a, b = ([rf"\frac{{{part}}}{{{ratio[0]}}}" for part in ratio[1:]] for ratio in (a, b))
    return _all_equal(a, b, compare)


def _time_of_day(text: str) -> tuple[str, str] | None:
    """Hours and minutes of 10:30 or 10:30 a.m., and `a` or `p`."""
    time = _TIME.fullmatch(text)
    return (f"{int(time[1])}:{time[2]}", (time[3] or "").casefold()) if time else None


def _results(text: str, compare: Callable[[str, str], bool]) -> list[str]:
    """The results of a chain of equations, if its sides without names agree.

    `\\text{7} \\approx 11` has one result: two that were not compared would be two guesses.
    """
    sides, signs = relations.sides(text)
    both: Sequence[Any] = ()
    for left, sign, right in zip(sides, signs, sides[1:]):
        both = expressions.constant(left), expressions.constant(right)
        if None not in both:
            x, y = map(expressions.inexact, both)
            places = [float(n.place or 1) for n in map(parse_number, (left, right)) if n]
            is_near = abs(x - y) * 100 <= abs(y) and abs(x - y) < max(places, default=1.0)
            if not (compare(left, right) if sign == "=" else is_near):
                return []
    return relations.results(text)[-1 if None in both else -2 :]


def _without_brackets(text: str) -> str:
    """`(5)` as 5 and `{x | x > 2}` as `x > 2`; brackets around several items stay."""
    text = condition(text)
    for _ in range(MAX_LEVELS):
        inside = bracketed(text)
        if inside is None or inside[0] != "()" or split(text) is not None:
            return text
        text = inside[1]
    return text


def _parts(text: str) -> Parts | None:
    if parse_number(text):  # 10,080 is no list
        return None
    return split(text) or relations.as_interval(text)


def _parts_equal(a: Parts, b: Parts, compare: Callable[[str, str], bool]) -> bool:
    a, b = _in_order_of_names(a, b), _in_order_of_names(b, a)
    if a.is_ordered or b.is_ordered:
        return a.brackets == b.brackets and _all_equal(a.items, b.items, compare)
    left = list(b.items)
    if len(a.items) != len(left):
        return False
    for item in a.items:
        found = next((i for i, other in enumerate(left) if compare(item, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _in_order_of_names(parts: Parts, other: Parts) -> Parts:
    """`y = 2, x = 1` as (1, 2) if the other is a tuple; other parts as they are."""
    named = dict(relations.named(item) for item in parts.items)
    if other.brackets != "()" or parts.is_ordered or "" in named:
        return parts
    return Parts("()", tuple(named[name] for name in sorted(named)))


def _all_equal(a: Sequence[str], b: Sequence[str], compare: Callable[[str, str], bool]) -> bool:
    return len(a) == len(b) and all(map(compare, a, b))
