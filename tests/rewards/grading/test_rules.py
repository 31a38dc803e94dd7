"""Single rules of the grader: what a text is read as."""

import time
from fractions import Fraction

import pytest

from semrl_jax.rewards.grading import equal, expressions, real_sets, relations
from semrl_jax.rewards.grading.choice import option_text
from semrl_jax.rewards.grading.numbers import Number, parse_number
from semrl_jax.rewards.grading.real_sets import as_real_set
from semrl_jax.rewards.grading.splitting import Parts, split
from semrl_jax.rewards.grading.text import is_words, normalized
from semrl_jax.rewards.verdict import VerifierSettings
from semrl_jax.rewards.verifiers import math


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"$\left( 3,\, \dfrac{\pi}{2} \right)$", r"( 3, \frac{\pi}{2} )"),
        (r"\$32,\!348.00 dollars.", "32,348.00"), ("（１，２）", "(1,2)"), ("≤", r"\leq"),
        (r"5\mathrm{~m/s}", "5"), (r"\mathrm{e}^{2}", "e^{2}"), ("√3", r"\sqrt{3}"),
        ("答案是：12平方厘米。", "12"), (r"12\%", r"12\%"), (r"\text{(C)}", "C"), ("5!", "5!"),
        (r"1 \\ 2", r"1 \\ 2"), (r"45^{\circ}", "45"), ("The answer is: 7", "7"), ("", ""),
    ],
)  # fmt: skip
def test_normalized_text(text, expected):
    assert normalized(text) == expected
    assert normalized(expected) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234.50", Number(Fraction("1234.5"), Fraction("0.01"))), ("27.0", Number(Fraction(27))),
        ("-1\\frac{4}{5}", Number(Fraction(-9, 5))),
        ("10^{-2}", Number(Fraction("0.01"))),
        ("1.5e3", Number(Fraction(1500), Fraction(100))),
        ("12.5\\%", Number(Fraction("12.5"), Fraction("0.1"), True)),
        ("3万", Number(Fraction(30000))), ("1,23", None), ("1/0", None), ("1e999", None),
        ("1e9999999", None), ("9" * 500, None), ("٣", None), ("", None), ("x", None), ("2k", None),
    ],
)  # fmt: skip
def test_numbers_as_written(text, number):
    assert parse_number(text) == number


def test_words_after_a_number_count_only_if_asked_for():
    assert parse_number("7 apples left") is None
    assert parse_number("7 apples left", with_words=True).value == 7
    for text in ("7 or x", "7x", "7 apples and 3 pears"):
        assert parse_number(text, with_words=True) is None


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("(1,(2,3))", Parts("()", ("1", "(2,3)"))), ("[0,1)", Parts("[)", ("0", "1"))),
        (r"\{1\}", Parts("", ("1",))), ("{}", Parts("", ())),
        ("1,2 and 3", Parts("", ("1", "2", "3"))),
        (r"a \cup b", Parts("union", ("a", "b"))), (r"x \pm 1", Parts("", ("x + 1", "x - 1"))),
        ("(1)(3)", Parts("", ("1", "3"))), ("(1)", None), ("f(1,2)", None), ("sand", None),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", Parts("matrix 2 2", ("1", "2", "3", "4"))),
        (",".join("1" * 65), None),
    ],
)  # fmt: skip
def test_parts(text, parts):
    assert split(text) == parts


def test_relations():
    assert relations.as_interval(r"-2 \leq x < 7") == Parts("[)", ("-2", "7"))
    assert relations.as_interval("x > 2") == Parts("()", ("2", r"\infty"))
    assert relations.as_interval(r"3 \geq x") == Parts("(]", (r"-\infty", "3"))
    assert relations.as_interval("a < x > b") is None
    assert relations.as_chain("b > a >= c") == (["c", "a", "b"], ["<=", "<"])
    assert relations.without_names("x=1,y=2", "3") == ("x=1,y=2", "3")
    assert relations.without_names("x=5", "y=5") == ("x=5", "y=5")


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("-2 < x < 2", "|x| < 2", True), ("-2 < x < 2", r"|x| \leq 2", False),
        (r"x \neq 3", r"(-\infty,3) \cup (3,\infty)", True),
        (r"(-\infty,3) \cup (3,\infty)", r"(-\infty,\infty) \setminus \{3\}", True),
        (r"(1,3) \cup (2,4)", "(1,4)", True), (r"(1,2) \cup (2,3)", "(1,3)", False),
        (r"(1,2) \cup \{2\}", "(1,2]", True), ("x > 2", "y > 2", False),
        (r"x^2 < 2", r"(-\sqrt{2}, \sqrt{2})", True), (r"x \in [1,2)", "1 <= x < 2", True),
        (r"x < 1 \text{ or } x > 2", r"x < 1 \text{ and } x > 2", False),
        (r"x \neq 0", r"(-\infty,0) \cup (0,\infty)", True), ("x + 1 > 0", "x > -1", True),
        ("-x > 0", "x > 0", False),
    ],
)  # fmt: skip
def test_sets_are_equal_if_they_have_the_same_numbers(a, b, same):
    sets = as_real_set(a), as_real_set(b)
    assert None not in sets
    assert real_sets.equal(*sets) is same
    assert real_sets.equal(*sets[::-1]) is same


@pytest.mark.parametrize("text", ["x > a", "(1,a)", "x + y > 2", "(1,2,3)", "5", "<", "x < y <"])
def test_what_is_no_set_of_numbers(text):
    assert as_real_set(text) is None


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("5 km", "5000 m", True), ("5 km", "5 m", False), (r"5\text{ kg}", r"5\text{ g}", False),
        ("50 cents", r"\$0.50", True), ("50 cents", r"\$50", False), ("5 euros", r"\$5", False),
        ("10 m/s", "36 km/h", True), ("3 square feet", "3 ft^2", True), ("3 m^2", "3 m^3", False),
        ("2 hours", "120 minutes", True), ("5 apples", "5 pears", True), ("5 km", "5", True),
        ("5千米", "5米", False), (r"5\text{ millimetres}", "0.5 cm", True),
    ],
)  # fmt: skip
def test_known_units_must_agree(a, b, same):
    assert equal(a, b) is same
    assert equal(b, a) is same


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("m+n=113", "113", True), ("m+n=112+1=113", "113", True), ("m+n=113", "112", False),
        ("2+3=6", "6", False), ("x^2+y^2=0", "0", False), ("4", "x^2+y^2=4", False),
        (r"\angle B = 40^\circ", "40", True), (r"\sqrt{2} \approx 1.414", r"\sqrt{2}", True),
        (r"\sqrt{2} \approx 1.9", r"\sqrt{2}", False), ("1 = 2", "2", False),
        (r"112 \approx 113", "112", False), (r"112 \approx 113", "113", False),
        (r"\sqrt{12544} \approx 113.0", "113", False),
        (r"\sqrt{143} \approx 12", r"\sqrt{143}", True),
        (r"1234567 \approx 1.23 \times 10^6", "1234567", True),
        (r"\pi \approx 3.1415", r"\pi", True),
    ],
)  # fmt: skip
def test_the_result_of_a_chain(answer, reference, same):
    assert equal(answer, reference) is same


@pytest.mark.parametrize(
    ("answer", "same"),
    [
        ("x=2, y=-7", True), ("y=-7, x=2", True), ("y=2, x=-7", False), ("x=2, x=-7", False),
        ("x=2", False), ("2, -7", False), ("x=2, y=-7, z=1", False), ("x=2, -7", False),
    ],
)  # fmt: skip
def test_named_values_are_a_tuple_in_the_order_of_their_names(answer, same):
    assert equal(answer, "(2,-7)") is same
    assert equal("(2,-7)", answer) is same
    assert not equal("x=-7, x=2", "(-7,2)")


def test_a_small_difference_is_no_zero():
    assert not equal(r"10^{-34}\sqrt{2}", r"10^{-34}\sqrt{3}")
    assert equal(r"(\sqrt{2}+\sqrt{3})^2-5-2\sqrt{6}", "0")
    assert not equal(r"10^{-34}\sqrt{2}", "0")


@pytest.mark.parametrize(
    ("answer", "decimal"),
    [
        (r"1.2 \cdot 3", "3.6"), (r"\sqrt{0.09}", "0.3"), ("0.6^2", "0.36"),
        (r"\cos(60^\circ)", "0.5"),
    ],
)  # fmt: skip
def test_a_short_decimal_is_what_has_exactly_its_value(answer, decimal):
    assert equal(answer, decimal) and equal(decimal, answer)
    assert not equal(answer, decimal.replace("3", "4").replace("5", "6"))
    assert not equal(r"\pi", "3.14") and not equal(r"\frac{\sqrt{2}}{2}", "0.7")


def test_braces_tell_numbers_apart():
    assert not equal(r"\frac{1}{23}", r"\frac{12}{3}")
    assert not equal("2^{34}", "2^{3}4")
    assert not equal("f'(x)", "f(x)")


def test_words_are_no_products():
    assert is_words("east") and is_words(r"\text{a}+b") and is_words("充要条件") and is_words("odd")
    assert not is_words(r"\frac{ab}{c}") and not is_words("arcsin x + cosh y")


def test_digits_are_the_same_with_words_around_them():
    for answer in ("1.2 oranges", "1 2 oranges", "(1,2,abc)", "2,3,abc"):
        joined = answer.translate({ord(c): None for c in "., "}).replace("abc", ",abc")
        assert not equal(answer, joined) and not equal(joined, answer)
    assert not equal("1.25abc", "125abc")
    assert equal("1,234 oranges", "1234 oranges") and equal("Dr. No, 7.", "Dr No 7")


def test_options_without_their_letters():
    assert option_text("A)A) 5") == "5" and option_text("(B) x+1") == "x+1"
    assert option_text("a1 = 3") == "a1 = 3"


def test_percent_needs_a_sign_or_the_row():
    assert equal("15\\%", "0.15") and equal("0.15", "15\\%")
    assert not equal("15", "0.15") and not equal("500", "5")
    assert equal("15", "0.15", percent=True) and equal("0.05", "5", percent=True)
    assert not equal("16", "0.15", percent=True)


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^{9}}}", "(10^9)!", "((99!)!)!", "2^{" + "9" * 300 + "}", r"\binom{10^9}{10^8}",
        r"e^{99999999 \ln 9}", r"\exp(\exp(\exp(\exp(9))))", r"\sin(10^{100000})",
        r"\gcd(10^{10^9},3)", r"\int_0^1 x dx", r"9^{9^9}|_{x=1}", "x" * 500, "(" * 50 + ")" * 50,
    ],
)  # fmt: skip
def test_values_beyond_the_limits_are_unequal(text):
    assert not expressions.expressions_equal(text, "1")


def test_values_within_the_limits():
    assert expressions.expressions_equal(r"\frac{2023!}{2022!}", "2023")
    assert not expressions.expressions_equal("2023!", "2023!+1")
    assert expressions.expressions_equal(r"\lfloor 10^{20}\pi \rfloor", "314159265358979323846")
    assert expressions.expressions_equal(r"\frac{x^2-1}{x-1}", "x+1")
    assert not expressions.expressions_equal(r"\sqrt{x^2}", "x")


@pytest.mark.parametrize("text", ["x|^{2}", "x|_{1}", "1 2", r"\frac{d}{dx} x", "A^T", "", "x^"])
def test_texts_that_the_parser_reads_wrongly_are_refused(text):
    assert expressions.parse(text) is None


def test_long_answers_are_wrong():
    assert not equal("1" * 5000, "1" * 5000)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("x^2 < 2000", "x^2 < 2001"), (r"x^2 \neq 2", r"x \neq \sqrt{2}"),
        (r"2x \neq 5", r"\mathbb{R}"),
        ("|x-40| < 0.01", r"\emptyset"), ("|x-50| < 1", "|x-50| < 1.1"), ("x > 10^7", "x > 10^8"),
        (r"(1,2)\cup(2.0001,3)", "(1,3)"), (r"\sin x < 1", r"\mathbb{R}"),
    ],
)  # fmt: skip
def test_sets_that_differ_far_out_or_at_one_point_are_unequal(a, b):
    assert not equal(a, b) and not equal(b, a)


def test_an_inequality_that_must_be_solved_is_no_set():
    assert as_real_set("x^2 - 3x + 2 < 0") is None and as_real_set("x + 1 < 2x") is None
    assert equal("x^2 - 3x + 2 < 0", "(x-1)(x-2) < 0")


@pytest.mark.parametrize("text", ["答案", "x\n\n", "\n"])
def test_a_long_response_without_a_letter_costs_one_pass(text):
    start = time.thread_time()
    response = text * (200_000 // len(text)) + "y"
    assert not math.verify(response, "A", VerifierSettings()).correct
    assert time.thread_time() - start < 1.5  # 0.1 s; minutes if the rule is quadratic


def test_ratios():
    assert equal("2:4:6", "1:2:3") and equal("a:b:c = 1:2:3", "1:2:3")
    assert not equal("2:3:4", "2:4:3") and not equal("2:3", "2:3:4") and not equal("0:1:2", "0:1:3")
