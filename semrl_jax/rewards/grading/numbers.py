"""Plain numbers: exact if both are written exactly, else within a relative tolerance of 1e-4."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

TOLERANCE = Fraction(1, 10_000)  # relative, of the evaluation protocol
MAX_CHARS = 400
MAX_EXPONENT = 400

_DIGITS = r"(?:\d{1,3}(?:,\s?\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_POWER_OF_TEN = r"10\s*\^\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+))"
_NUMBER = re.compile(
    rf"([-+]?)\s*(?:({_DIGITS})(?:[eE]([-+]?\d+)|\s*(?:\\times|\\cdot|\*|x)\s*{_POWER_OF_TEN})?"
    rf"|{_POWER_OF_TEN})"
)
_FRACTION = re.compile(
    rf"([-+]?)\s*(\d+\s*(?=\\frac)|\d+\s+(?=\d+\s*/))?"
    rf"(?:\\frac\s*\{{\s*(-?)\s*({_DIGITS})\s*\}}\s*\{{\s*(-?)\s*({_DIGITS})\s*\}}"
    rf"|({_DIGITS})\s*/\s*({_DIGITS}))"
)
_PERCENT = re.compile(r"\s*(?:\\?%|(?:\\text\s*\{\s*)?\b(?:percent|per cent|pct)\b(?:\s*\})?)$")
_SCALE = re.compile(r"\s*(?:\\text\s*\{\s*)?(hundred|thousand|million|billion|万|亿)(?:\s*\})?$")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "万": 4, "亿": 8}
_WORDS = re.compile(
    r"(?<=[\d%}])(?:\s*\\text\s*\{[^{}]*\}(?:\^\d)?|\s+(?!or\b|and\b)[a-zA-Z]{2,}[^\d\\]*"
    r"|\s*[\u4e00-\u9fff][^\d\\]*)$"
)


class Number(NamedTuple):
    """A number as written.

    Attributes:
      value: of the digits; 10 for `10%`.
      is_exact: an integer or a fraction of integers; `27.0` counts, `0.5` and `1e3` do not.
      is_percent: with a percent sign.
    """

    value: Fraction
    is_exact: bool
    is_percent: bool = False

    def meanings(self) -> tuple[Fraction, ...]:
        """10 % may be written as 10 or as 0.1."""
        return (self.value, self.value / 100) if self.is_percent else (self.value,)


def parse_number(text: str, *, with_words: bool = False) -> Number | None:
    """Reads integer, decimal, fraction, mixed number, scientific notation, and percent.

    Args:
      text: a normalised answer.
      with_words: also read `7 apples left`, a number before words without digits.
    """
    if len(text) > MAX_CHARS or not any(c.isdecimal() and c.isascii() for c in text):
        return None
    if with_words and not (_PERCENT.search(text) or _SCALE.search(text)):
        text = _WORDS.sub("", text)
    bare = _PERCENT.sub("", text)
    is_percent = bare != text
    exponent = 0
    if scale := _SCALE.search(bare):
        bare, exponent = bare[: scale.start()], _SCALES[scale[1]]
    number = _decimal(bare.strip()) or _fraction(bare.strip())
    if number is None:
        return None
    return Number(number.value * 10**exponent, number.is_exact, is_percent)


def _decimal(text: str) -> Number | None:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, digits, *exponents = match.groups()
    written = [exponent for exponent in exponents if exponent]
    exponent = int(written[0]) if written and len(written[0]) < 6 else 0
    if abs(exponent) > MAX_EXPONENT or (written and len(written[0]) >= 6):
        return None
    value = _value(digits or "1") * Fraction(10) ** exponent
    is_exact = (not written or digits is None) and _value(digits or "1").denominator == 1
    return Number(-value if sign == "-" else value, is_exact)


def _fraction(text: str) -> Number | None:
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, whole, top_sign, top, bottom_sign, bottom, plain_top, plain_bottom = match.groups()
    above, below = _value(top or plain_top), _value(bottom or plain_bottom)
    if below == 0:
        return None
    value = above / below
    if top_sign:
        value = -value
    if bottom_sign:
        value = -value
    value += int(whole or 0)
    is_exact = above.denominator == below.denominator == 1
    return Number(-value if sign == "-" else value, is_exact)


def _value(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").replace(" ", "").rstrip(".") or 0)


def numbers_equal(a: Number, b: Number, *, percent: bool = False) -> bool:
    """Whether two numbers are equal. Symmetric.

    Two exact numbers must be equal exactly, others within 1e-4 of the larger one: 0.3333 is 1/3,
    and 70001 is not 70000. Percent: a number may also be 100 times the other or a hundredth of it
    if one of them has a percent sign, or with `percent`. The evaluation protocol does that with
    every pair, and uses the tolerance for integers too. It would call 500 right where the answer
    is 5, and 70001 where it is 70000.
    """
    if a.is_percent and b.is_percent:
        pairs = [(a.value, b.value)]
    else:
        pairs = [(x, y) for x in a.meanings() for y in b.meanings()]
        if percent:
            pairs += [(a.value * 100, b.value), (a.value, b.value * 100)]
    return any(values_close(x, y, is_exact=a.is_exact and b.is_exact) for x, y in pairs)


def values_close(a: Fraction, b: Fraction, *, is_exact: bool) -> bool:
    """Equal, or if one of them is not exact, within the relative tolerance."""
    return a == b or (not is_exact and abs(a - b) <= TOLERANCE * max(abs(a), abs(b)))
