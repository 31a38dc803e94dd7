"""Whether two answers are equal: text, numbers, parts, equations, then expressions."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

from semrl_jax.rewards.grading import expressions, relations
from semrl_jax.rewards.grading.numbers import numbers_equal, parse_number
from semrl_jax.rewards.grading.splitting import Parts, bracketed, condition, split
from semrl_jax.rewards.grading.text import MAX_CHARS, is_words, normalized, same_text

MAX_LEVELS = 4  # of parts in parts, such as a set of pairs
_BASE = re.compile(r"(\w+)_\{?(\d{1,2})\}?")
_CLOCK = re.compile(r"\d{1,2}:\d\d(?:\s*[ap]\.?m\.?)?", re.IGNORECASE)


@functools.lru_cache(maxsize=8192)
def equal(answer: str, reference: str, *, percent: bool = False) -> bool:
    """Whether an answer equals a reference answer; the first rule that decides counts.

    1. The same text, but for case, spaces, fonts, units, currency and punctuation.
    2. Two numbers: see `numbers_equal`.
    3. Numbers to a base: the digits must be equal. One of them may leave out the base.
    4. Tuples, intervals and matrices: the same brackets, and equal elements in the same order.
       Sets, lists and unions: equal elements in any order; `1 \\pm 2` has two.
    5. Inequalities: the same interval, or the same sides in the same order.
    6. Equations: the same difference of the sides, but for a factor. `x = 5` and `5` are equal.
    7. Words: never equal here, because rule 1 has compared them.
    8. Expressions: the same values, see `expressions_equal`.

    Args:
      answer: as the model wrote it, without a box.
      reference: the right answer, as the benchmark writes it.
      percent: whether a number may differ by a factor of 100, see `numbers_equal`.

    Returns:
      False also if an answer is longer than 4096 characters. Hostile text may run long.
    """
    if max(len(answer), len(reference)) > MAX_CHARS:
        return False
    return _equal(normalized(answer), normalized(reference), percent, MAX_LEVELS)


def _equal(answer: str, reference: str, percent: bool, levels: int) -> bool:
    answer, reference = _without_brackets(answer), _without_brackets(reference)
    if same_text(answer, reference):
        return True
    if not answer or not reference or levels == 0:
        return False
    numbers = parse_number(answer), parse_number(reference)
    if numbers[0] is None or numbers[1] is None:
        if numbers[1]:
            numbers = parse_number(answer, with_words=True), numbers[1]
        elif numbers[0]:
            numbers = numbers[0], parse_number(reference, with_words=True)
    if numbers[0] and numbers[1]:
        return numbers_equal(numbers[0], numbers[1], percent=percent)
    compare = functools.partial(_equal, percent=percent, levels=levels - 1)
    bases = _BASE.fullmatch(answer), _BASE.fullmatch(reference)
    if any(base and base[1][0].isdigit() for base in bases):
        if bases[0] and bases[1]:
            return bases[0].groups() == bases[1].groups()
        return (bases[0] or bases[1])[1] in (answer, reference)
    if _CLOCK.fullmatch(answer) and _CLOCK.fullmatch(reference):
        return False
    chains = relations.as_chain(answer), relations.as_chain(reference)
    if chains[0] and chains[1]:
        (sides, signs), (reference_sides, reference_signs) = chains
        return signs == reference_signs and _all_equal(sides, reference_sides, compare)
    values = relations.without_names(answer, reference)
    if values != (answer, reference) and compare(*values):
        return True
    parts = _parts(answer), _parts(reference)
    if parts[0] or parts[1]:
        return _parts_equal(
            parts[0] or Parts("", (answer,)), parts[1] or Parts("", (reference,)), compare
        )
    if is_words(answer) or is_words(reference):
        return False
    equations = relations.as_equation(answer), relations.as_equation(reference)
    if equations[0] and equations[1]:
        return expressions.equations_equal(*equations)
    return expressions.expressions_equal(answer, reference)


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
    return split(text) or relations.as_interval(text)


def _parts_equal(a: Parts, b: Parts, compare: Callable[[str, str], bool]) -> bool:
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


def _all_equal(a: Sequence[str], b: Sequence[str], compare: Callable[[str, str], bool]) -> bool:
    return len(a) == len(b) and all(map(compare, a, b))
