"""Mathematical expressions: LaTeX to a sympy tree, and its value at points, within limits.

The parser is that of math-verify (latex2sympy2_extended). It builds the tree from grammar rules,
but reads digits with `sympy.Number`, which ends in Python's `eval`, as `sympify`, `parse_expr` and
`lambdify` do. Here digits are read without it, and none of the others is used, so no text is ever
executed. Only known LaTeX commands are parsed, because others, such as \\int, \\det or \\gcd, make
the parser compute. sympy itself computes nothing either: the tree stays unevaluated, and `value`
goes through it with exact fractions and 40 digits, so that no number becomes huge.
"""

from __future__ import annotations

import functools
import random
import re
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import mpmath

from semrl_jax.rewards.grading.numbers import tolerance

MAX_CHARS = 400
MAX_DEPTH = 10  # nested brackets; the parser's time grows exponentially with them
MAX_BITS = 60_000  # of an exact number: 2023! has 19,272
MAX_MAGNITUDE = 1_000_000  # bits of the exponent of an inexact number
MAX_ARGUMENT = 100  # bits before the point in an argument of sin, whose digits are lost otherwise
MAX_FACTORIAL = 5000
DIGITS = 40  # of an inexact number
MORE_DIGITS = 160  # where 40 do not tell a small difference from none
MAX_DENOMINATOR = 10**9  # of a fraction that an inexact number stands for
NUM_POINTS = 12
MIN_POINTS = 3  # at which both have a value

_COMMAND_NAMES = """
    frac sqrt pi cdot times div infty { } lfloor rfloor lceil rceil sin cos tan cot sec csc arcsin
    arccos arctan sinh cosh tanh log ln exp alpha beta gamma delta epsilon zeta eta theta lambda mu
    nu xi rho sigma tau phi psi omega upsilon varphi Delta Omega
"""
COMMANDS = frozenset(_COMMAND_NAMES.split())
_COMMAND = re.compile(r"\\([a-zA-Z]+|.|$)")
_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
# Read wrongly by the parser: two numbers side by side, derivatives, primes, values at a point,
# transposed matrices, ratios of three, double factorials, dates.
_REFUSED = re.compile(
    r"(?<![_^\d])\d+\s+\d|\\frac\s*\{\s*d\w*\s*\}\s*\{\s*d|\|\s*_|\^\s*\{?\s*T\b|[_^]\s*$|[#&@?'\":]"
    r"|!\s*!|\d[-/]\d+[-/]\d{4}|\d{4}[-/]\d+[-/]\d"
)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_EULER = re.compile(r"\\[a-zA-Z]+|(?<![a-zA-Z])e(?![a-zA-Z])|e(?=\s*\^)")
NO_VALUE = (ArithmeticError, ValueError, TypeError, MemoryError)
EULER, IMAGINARY = "upsilon", "i"  # names of these numbers in the tree


class NoValueError(ArithmeticError):
    """An expression has no value at a point, or none within the limits."""


def prepare() -> None:
    """Imports the parser, which takes up to a second."""
    parse(r"\frac{1}{2}")


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Any:
    """The unevaluated tree of a normalised expression; None if it has none within the limits."""
    if not text or len(text) > MAX_CHARS or _depth(text) > MAX_DEPTH or _REFUSED.search(text):
        return None
    if text.count("|") % 2:  # a value at a point
        return None
    text = _BINOMIAL.sub(r"\\frac{(\1)!}{(\2)!((\1)-(\2))!}", text)
    if any(command not in COMMANDS for command in _COMMAND.findall(text)):
        return None
    text = _EULER.sub(lambda match: match[0] if match[0] != "e" else rf"\{EULER} ", text)
    try:
        tree = _converter()().parse(_THOUSANDS.sub("", text))
    except Exception:  # the parser raises Exception itself, and others on unexpected trees
        return None
    return tree if hasattr(tree, "free_symbols") else None


@functools.cache
def _converter() -> Callable[[], Any]:
    """Makes parsers, which keep state and serve one text each. Names keep their case."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy

    class Converter(_Latex2Sympy):
        def parse_number(self, text: str) -> Any:
            return sympy.Integer(int(text)) if text.isdecimal() else sympy.Float(text, DIGITS)

    config = ConversionConfig(lowercase_symbols=False)
    return lambda: Converter(config=config)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _has(tree: Any, name: str) -> bool:
    return type(tree).__name__ == name or any(_has(argument, name) for argument in tree.args)


def degree(tree: Any) -> float:
    """Degree of a polynomial; infinity for other functions."""
    degrees = list(map(degree, tree.args))
    if tree.is_Symbol:
        return float(tree.name != EULER)
    if not any(degrees):
        return 0.0
    return max(degrees) if tree.is_Add else sum(degrees) if tree.is_Mul else float("inf")


def expressions_equal(a: str, b: str) -> bool:
    """Whether two normalised expressions have the same value, at 12 fixed points if any has names.

    A point counts if both values are real there. If too few do, complex values count. This shows
    that sqrt(x^2) is not x, and that log(x^2) is 2 log(x). Decimals of four digits or more may be
    rounded, see `tolerance`.
    """
    trees = parse(a), parse(b)
    if None in trees or any(_has(tree, "ComplexInfinity") for tree in trees):  # 2/0 is not 3/0
        return False
    functions = (functools.partial(value, tree) for tree in trees)
    return trees[0] == trees[1] or same_values(*functions, trees, tolerance(a, b))


def equations_equal(a: tuple[str, str], b: tuple[str, str]) -> bool:
    """Whether two equations (left, right) are the same: their differences, but for a factor."""
    trees = [parse(side) for side in (*a, *b)]
    if None in trees:
        return False

    def difference(left: Any, right: Any, point: Mapping[str, Any]) -> Any:
        return _add([value(left, point), _multiply([Fraction(-1), value(right, point)])])

    first = functools.partial(difference, *trees[:2])
    second = functools.partial(difference, *trees[2:])
    return same_values(first, second, trees, tolerance(*a, *b), up_to_a_factor=True)


def constant(text: str) -> Any:
    """The real value of a normalised expression without names; None if it has none."""
    tree = parse(text)
    if tree is None or {symbol.name for symbol in tree.free_symbols} - {EULER}:
        return None
    with mpmath.workdps(DIGITS):
        try:
            found = value(tree, {})
        except NO_VALUE:
            return None
        if isinstance(found, Fraction):
            return found
        return mpmath.re(found) if _is_real(found) else None


def as_fraction(x: Any) -> Fraction:
    """A value of `constant`, with all its digits; 1.2 times 3 is 18/5, to which it is equal."""
    if isinstance(x, Fraction):
        return x
    found = Fraction(*mpmath.libmp.to_rational(x._mpf_))
    short = found.limit_denominator(MAX_DENOMINATOR)
    return short if abs(found - short) * 10**25 <= abs(found) else found


def same_values(
    first: Callable[[Mapping[str, Any]], Any],
    second: Callable[[Mapping[str, Any]], Any],
    trees: Any,
    rounding: Fraction,
    *,
    up_to_a_factor: bool = False,
) -> bool:
    """Compares two functions of a point at all points where both have a value.

    Values that agree to 25 digits of 1, but not of their own size, are computed again with more
    digits: the difference of two irrational numbers may be 0, or 1e-34.
    """
    names = {symbol.name for tree in trees for symbol in tree.free_symbols}
    is_complex = IMAGINARY in names or any(_has(tree, "ImaginaryUnit") for tree in trees)
    names -= {EULER, IMAGINARY}
    functions = {f.func.__name__ for tree in trees for f in _undefined(tree)}
    points = _points(tuple(sorted(names | functions)))
    for digits in (DIGITS, MORE_DIGITS):
        with mpmath.workdps(digits):
            pairs = _values(first, second, points, is_complex)
            if up_to_a_factor:  # the ratio of the first pair without a 0
                exact = Fraction(0)
                pivots = (p for p in pairs if all(_near(x, 0, exact, DIGITS) is False for x in p))
                pivot = next(pivots, None)
                factor = _divide(*pivot) if pivot else Fraction(1)
                pairs = [(x, _multiply([factor, y])) for x, y in pairs]
            near = [_near(x, y, rounding, digits) for x, y in pairs]
        if None not in near:
            return bool(near) and all(near)
    return False


def _values(first: Any, second: Any, points: Any, is_complex: bool) -> list[tuple[Any, Any]]:
    """The values of both functions at the points that count; none if too few do."""
    values = []
    for point in points:
        try:
            values.append((first(point), second(point)))
        except NO_VALUE:
            continue
    real = [pair for pair in values if all(map(_is_real, pair))]
    least = 1 if len(points) == 1 else MIN_POINTS
    used = real if len(real) >= least and not is_complex else values
    return used if len(used) >= least else []


@functools.lru_cache(maxsize=256)
def _points(names: tuple[str, ...]) -> list[dict[str, Fraction]]:
    """Points that depend on the names only; the first half is positive, in the rest signs vary."""
    if not names:
        return [{}]
    random_ = random.Random(zlib.crc32(" ".join(names).encode()))
    points = []
    for index in range(NUM_POINTS):
        point = {}
        for name in names:
            size = Fraction(random_.randrange(200_000, 2_900_000), 1_000_003)
            is_negative = index >= NUM_POINTS // 2 and random_.random() < 0.6
            point[name] = -size if is_negative else size
        points.append(point)
    return points


def _undefined(tree: Any) -> list[Any]:
    """The functions that have no meaning of their own, such as f in f(x)."""
    from sympy.core.function import AppliedUndef

    found = [tree] if isinstance(tree, AppliedUndef) else []
    return found + [f for argument in tree.args for f in _undefined(argument)]


def _is_real(x: Any) -> bool:
    return isinstance(x, Fraction) or abs(mpmath.im(x)) <= mpmath.mpf(10) ** -25 * (1 + abs(x))


def _near(a: Any, b: Any, rounding: Fraction, digits: int) -> bool | None:
    """Whether two values are equal, to 25 digits or less by `rounding`; None: more digits tell."""
    if isinstance(a, Fraction) and isinstance(b, (Fraction, int)) and not rounding:
        return a == b
    a, b = inexact(a), inexact(b)
    distance, size = abs(a - b), max(abs(a), abs(b))
    if distance <= mpmath.mpf(10) ** -25 * size:
        return True
    if rounding and 2 * distance <= size * rounding.numerator / rounding.denominator:
        return True
    if digits == DIGITS:
        return None if distance <= mpmath.mpf(10) ** -25 else False
    return bool(distance <= mpmath.mpf(10) ** (DIGITS - digits))


def value(tree: Any, point: Mapping[str, Any]) -> Any:
    """The value of a tree: a Fraction or an mpmath number; ArithmeticError if none is in limits."""
    kind, arguments = type(tree).__name__, tree.args
    if tree.is_Symbol:
        if tree.name == EULER:
            return +mpmath.e
        return mpmath.mpc(0, 1) if tree.name == IMAGINARY else point[tree.name]
    if tree.is_Rational:
        return _checked(Fraction(int(tree.p), int(tree.q)))
    if tree.is_Float:
        return _checked(mpmath.make_mpf(tree._mpf_))
    if kind in _CONSTANTS:
        return _CONSTANTS[kind]()
    if tree.is_Add:
        return _add([value(argument, point) for argument in arguments])
    if tree.is_Mul:
        return _multiply([value(argument, point) for argument in arguments])
    values = [value(argument, point) for argument in arguments]
    if tree.is_Pow:
        return _power(*values)
    if kind == "UnevaluatedExpr":
        return values[0]
    if kind in _FUNCTIONS:
        return _function(kind, values)
    if kind == tree.func.__name__ and kind in point:  # undefined: f(x), or a product as in a(b + 1)
        return _multiply([point[kind], *values])
    if kind == EULER:
        return _multiply([+mpmath.e, *values])
    raise NoValueError(kind)


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "Pi": lambda: +mpmath.pi,
    "Exp1": lambda: +mpmath.e,
    "ImaginaryUnit": lambda: mpmath.mpc(0, 1),
    "EulerGamma": lambda: +mpmath.euler,
}
_FUNCTION_NAMES = """
    exp log sin cos tan cot sec csc asin acos atan sinh cosh tanh Abs floor ceiling factorial
"""
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())


def _function(kind: str, values: list[Any]) -> Any:
    x = values[0]
    if kind == "factorial":
        if not isinstance(x, Fraction) or x.denominator != 1 or not 0 <= x <= MAX_FACTORIAL:
            if isinstance(x, Fraction) and x.denominator == 1:
                raise NoValueError("factorial")
            return _checked(mpmath.gamma(_small(x) + 1))
        return Fraction(functools.reduce(lambda a, b: a * b, range(1, int(x) + 1), 1))
    if kind == "Abs":
        return abs(x)
    if kind in ("floor", "ceiling"):
        if not isinstance(x, Fraction):
            x = Fraction(int(mpmath.nint(_small(x) * 2**60)), 2**60)
        return Fraction(x.__floor__() if kind == "floor" else x.__ceil__())
    if kind == "log" and len(values) == 2:
        return _divide(_function("log", values[:1]), _function("log", values[1:]))
    if kind == "log":
        x = inexact(x)
        if x == 0:
            raise NoValueError("log 0")
        return mpmath.log(x)
    if kind == "exp" and mpmath.mag(inexact(x)) > 20:
        raise NoValueError("exp")
    return _checked(getattr(mpmath, kind)(_small(x)))


def _small(x: Any) -> Any:
    x = inexact(x)
    if x != 0 and mpmath.mag(x) > MAX_ARGUMENT:
        raise NoValueError("argument")
    return x


def inexact(x: Any) -> Any:
    if isinstance(x, Fraction):
        return mpmath.mpf(x.numerator) / x.denominator
    return mpmath.mpmathify(x) if isinstance(x, int) else x


def _checked(x: Any) -> Any:
    """The number, if it is within the limits."""
    if isinstance(x, Fraction):
        if max(x.numerator.bit_length(), x.denominator.bit_length()) <= MAX_BITS:
            return x
        x = inexact(x)
    if not mpmath.isfinite(x) or (x != 0 and abs(mpmath.mag(x)) > MAX_MAGNITUDE):
        raise NoValueError("size")
    return x


def _add(values: list[Any]) -> Any:
    return functools.reduce(lambda a, b: _checked(_both(a, b, lambda x, y: x + y)), values)


def _multiply(values: list[Any]) -> Any:
    return functools.reduce(lambda a, b: _checked(_both(a, b, lambda x, y: x * y)), values)


def _divide(a: Any, b: Any) -> Any:
    if b == 0:
        raise NoValueError("division by 0")
    return _checked(_both(a, b, lambda x, y: x / y))


def _both(a: Any, b: Any, operation: Callable[[Any, Any], Any]) -> Any:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return operation(a, b)
    return operation(inexact(a), inexact(b))


def _power(base: Any, exponent: Any) -> Any:
    if base == 0:
        if isinstance(exponent, Fraction) and exponent > 0:
            return Fraction(0)
        raise NoValueError("0 to a power that is not positive")
    if not isinstance(exponent, Fraction):
        if mpmath.mag(exponent) > 40:
            raise NoValueError("exponent")
    elif exponent.denominator == 1:
        power = abs(int(exponent))
        if isinstance(base, Fraction):
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if bits * power <= MAX_BITS:
                return base ** int(exponent)
        if power > MAX_MAGNITUDE:
            raise NoValueError("exponent")
        return _checked(mpmath.power(inexact(base), int(exponent)))
    elif exponent.denominator % 2 and exponent.denominator < 100 and _is_real(base) and base < 0:
        root = mpmath.power(-inexact(base), inexact(abs(exponent)))  # the real root, not complex
        root = -root if exponent.numerator % 2 else root
        return _checked(root if exponent > 0 else 1 / root)
    if mpmath.mag(inexact(exponent)) > 40:
        raise NoValueError("exponent")
    if abs(mpmath.mag(inexact(base))) * abs(inexact(exponent)) > MAX_MAGNITUDE:
        raise NoValueError("power")
    return _checked(mpmath.power(inexact(base), inexact(exponent)))
