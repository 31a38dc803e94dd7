"""Plain numbers: exact, or correctly rounded to the digits that are written."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from semrl_jax.rewards.last_number import is_unit

TOLERANCE = Fraction(1, 10_000)  # relative, of the evaluation protocol
LEAST_DIGITS = Fraction(1, 1000)  # relative size of the last place: 4 digits, as in 0.3333
FLOAT64 = Fraction(1, 10**14)  # relative: 0.30000000000000004 is 0.3 as a program prints it
MAX_CHARS = 400
MAX_EXPONENT = 400

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:\s\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_POWER_OF_TEN = r"10\s*\^\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+))"
_NUMBER = re.compile(
    rf"([-+]?)\s*(?:({_DIGITS})(?:[eE]([-+]?\d+)|\s*(?:\\times|\\cdot|\*|x)\s*{_POWER_OF_TEN})?"
    rf"|{_POWER_OF_TEN})"
)
_FRACTION = re.compile(
    rf"([-+]?)\s*(\d+\s*(?=\\frac)|\d+\s+(?=\d+\s*/)|\d+\s*\+\s*(?=\\frac|\d+\s*/))?"
    rf"(?:\\frac\s*\{{\s*(-?)\s*({_DIGITS})\s*\}}\s*\{{\s*(-?)\s*({_DIGITS})\s*\}}"
    rf"|({_DIGITS})\s*/\s*({_DIGITS}))"
)
_REPEATING = re.compile(
    r"([-+]?)\s*(\d*)\.(\d*?)(?:\\(?:overline|bar|dot)\s*\{?(\d+)\}?(?:\\dot\s*\{?(\d)\}?)?|\((\d+)\)"
    r"|(\d{1,12}?)\7{1,}\.{2,3})"
)
_CONTINUED = re.compile(r"[-+]?\d*\.\d+\.{2,3}")  # 3.1415...
_PERCENT = re.compile(
    r"\s*(?:\\?%|(?:\\text\s*\{\s*)?\b(?:percent(?:age)?|per cent|pct)\b(?:\s*\})?)$"
)
_SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9,
    "trillion": 10**12, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8,
}  # fmt: skip
_SCALE = re.compile(rf"\s*(?:\\text\s*\{{\s*)?({'|'.join(_SCALES)})(?:\s*\}})?$")
_WORDS = re.compile(
    r"(?<=[\d%}])(?:\s*\\text\s*\{[^{}]*\}(?:\^\d)?|\s*\(\s*[a-zA-Z]{3}[^\d\\()]*\)"
    r"|(?:\s+(?:[a-zA-Z]{3}|in\b|of\b)|\s*/\s*[a-zA-Z]{3})[^\d\\]*|\s*[\u4e00-\u9fff][^\d\\]*)$"
)
_NAMES = "zero one two three four five six seven eight nine ten eleven twelve"
_DIGITS_OF = {name: str(number) for number, name in enumerate(_NAMES.split())}


class Number(NamedTuple):
    """A number as written."""

    value: Fraction  # of the digits; 10 for `10%`
    # What 1 in the last place is worth, such as 0.01 for `2.50`; 0 if the number is exact: an
    # integer, also `27.0`, or a fraction of integers.
    place: Fraction = Fraction(0)
    is_percent: bool = False  # with a percent sign

    def scaled(self, factor: Fraction) -> Number:
        """The number times a factor, without a percent sign."""
        return Number(self.value * factor, self.place * factor)

    def meanings(self) -> tuple[Number, ...]:
        """10 % may be written as 10 or as 0.1."""
        return (self, self.scaled(Fraction(1, 100))) if self.is_percent else (self,)


def parse_number(text: str, *, with_words: bool = False) -> Number | None:
    """Reads integer, decimal, fraction, mixed number, scientific notation, and percent.

    The text is normalised. `with_words` leaves out words after the number: `7 apples`, `12元`.
    None if the text is anything else, or the number is above the limits.
    """
    text = _DIGITS_OF.get(text.casefold(), text)
    if len(text) > MAX_CHARS or not re.search("[0-9]", text) or not text.isprintable():
        return None
    if with_words and (words := _WORDS.search(text)) and is_unit(words[0]):
        text = text[: words.start()]
    bare = _PERCENT.sub("", text)
    is_percent = bare != text
    factor = Fraction(1)
    if scale := _SCALE.search(bare):
        bare, factor = bare[: scale.start()], Fraction(_SCALES[scale[1]])
    bare = bare.strip()
    number = _decimal(bare) or _fraction(bare) or _repeating(bare)
    if number is None and _CONTINUED.fullmatch(bare):
        number = _decimal(bare.rstrip("."))
    return number.scaled(factor)._replace(is_percent=is_percent) if number else None


def _decimal(text: str) -> Number | None:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, digits, *exponents = match.groups()
    written = next((exponent for exponent in exponents if exponent), "0")
    if len(written) > 5 or abs(int(written)) > MAX_EXPONENT:
        return None
    value, power = _value(digits or "1"), Fraction(10) ** int(written)
    decimals = len((digits or "").partition(".")[2])
    # 1.50e3 has three digits, and 27.0 is an integer.
    is_exact = value.denominator == 1 and (digits is None or written == "0" or not decimals)
    place = Fraction(0) if is_exact else power / 10**decimals
    return Number(-value * power if sign == "-" else value * power, place)


def _fraction(text: str) -> Number | None:
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, whole, top_sign, top, bottom_sign, bottom, plain_top, plain_bottom = match.groups()
    above, below = _value(top or plain_top), _value(bottom or plain_bottom)
    if below == 0:
        return None
    value = above / below
    if bool(top_sign) != bool(bottom_sign):
        value = -value
    value += int((whole or "0").rstrip(" +"))
    return Number(-value if sign == "-" else value)


def _repeating(text: str) -> Number | None:
    """Reads exact values: `0.1\\overline{6}`, `0.\\dot{3}`, `0.(3)` and `0.333...`."""
    match = _REPEATING.fullmatch(text)
    if match is None:
        return None
    sign, whole, before, over, last, in_brackets, dotted = match.groups()
    period = (over or in_brackets or dotted) + (last or "")
    value = int(whole or 0) + Fraction(int(before or 0), 10 ** len(before))
    value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(before))
    return Number(-value if sign == "-" else value)


def _value(digits: str) -> Fraction:
    return Fraction(re.sub(r"[,\s]", "", digits).rstrip(".") or 0)


def numbers_equal(a: Number, b: Number, *, percent: bool = False) -> bool:
    """Whether two numbers are equal. Symmetric.

    Exact numbers must be equal exactly. A decimal also equals a number that it is rounded or
    truncated from, if it has four digits or more: 0.3333 is 1/3; 9.999999 is not 10, 70001 is not
    70000, and 2.5 is not 2.50001. Percent: a number may also be 100 times the other or a hundredth
    of it if one of them has a percent sign, or with `percent`. The evaluation protocol does that
    with every pair, and takes all numbers within 1e-4 for equal, such as 70001 and 70000.
    """
    if a.is_percent and b.is_percent:
        pairs = [(a, b)]
    else:
        pairs = [(x, y) for x in a.meanings() for y in b.meanings()]
        if percent:
            pairs += [(a.scaled(Fraction(100)), b), (a, b.scaled(Fraction(100)))]
    return any(values_close(x, y) for x, y in pairs)


def values_close(a: Number, b: Number) -> bool:
    """Whether two numbers are equal, or one is the other with fewer digits."""
    distance, size = abs(a.value - b.value), max(abs(a.value), abs(b.value))
    if distance == 0:
        return True
    short, long = (a, b) if a.place > b.place else (b, a)
    is_truncated = abs(short.value) < abs(long.value) and distance < short.place
    is_precise = short.place <= LEAST_DIGITS * size and distance <= TOLERANCE * size
    if is_precise and (is_truncated or distance * 2 <= short.place):
        return True
    finest = min((place for place in (a.place, b.place) if place), default=size)
    return finest <= FLOAT64 * size and distance <= FLOAT64 * size


_DECIMAL = re.compile(r"\d*\.\d+")


def tolerance(*texts: str) -> Fraction:
    """Relative tolerance of expressions with the decimals of these texts; 0 without a rounded one.

    The last place of a decimal of four digits or more bounds it, so that 1.4142 is \\sqrt{2}.
    """
    found = Fraction(0)
    for digits in _DECIMAL.findall(" ".join(texts)):
        value = Fraction(digits)
        place = Fraction(1, 10 ** len(digits.partition(".")[2]))
        if value and place <= LEAST_DIGITS * value:
            found = max(found, min(place / value, TOLERANCE))
    return found
