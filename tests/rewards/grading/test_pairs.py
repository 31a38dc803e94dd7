"""Verdicts on the pairs that people judged, on recorded responses, and properties of equality."""

import json
import pathlib
from fractions import Fraction

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from sympy.parsing import sympy_parser

from semrl_jax.rewards import VerifierSettings
from semrl_jax.rewards.grading import equal, expressions
from semrl_jax.rewards.verifiers import benchmark, math
from tests.rewards.grading.pairs import CHOICES, PAIRS

REPORTED = pathlib.Path(__file__).with_name("reported.jsonl")
SETTINGS = VerifierSettings()
KINDS = list(dict.fromkeys(pair.kind for pair in PAIRS))


@pytest.fixture(scope="module", autouse=True)
def no_evaluation():
    """Texts that sympy would have evaluated: it makes objects from text in `eval_expr`."""
    seen = []
    expressions.parse.cache_clear()
    equal.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sympy_parser, "eval_expr", lambda code, *_: seen.append(code))
        yield seen
    assert not seen
    expressions.parse.cache_clear()


def test_there_are_enough_pairs_of_every_kind():
    assert len(PAIRS) + len(CHOICES) > 350
    for kind in KINDS:
        assert {pair.correct for pair in PAIRS if pair.kind == kind} == {True, False}, kind


@pytest.mark.parametrize("kind", KINDS)
def test_the_verdict_is_that_of_a_person(kind):
    mistaken = []
    for pair in PAIRS:
        if pair.kind == kind:
            response = rf"So \boxed{{1}}, no, \boxed{{{pair.answer}}} is it."
            verdict = benchmark.verify(response, pair.reference, SETTINGS)
            assert verdict.score == float(verdict.correct) and not verdict.error
            if verdict.correct is not pair.correct:
                mistaken.append(pair)
    assert not mistaken


@pytest.mark.parametrize(("verifier", "step"), [(math, 1), (benchmark, 10)])
def test_reported_answers_are_graded_rightly(verifier, step):
    """Cases of public bug reports, and neighbours of each that a careless grader accepts.

    `python -m benchmarks.grading` compares with math-verify.
    """
    rows = [json.loads(line) for line in REPORTED.read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 1100 and sum(not row["correct"] for row in rows) > 550
    refused = []
    for row in rows[::step]:  # both verifiers have one grader
        verdict = verifier.verify(row["response"], row["reference"], SETTINGS)
        if verdict.correct:
            assert row["correct"], (row, verdict)
        elif row["correct"]:
            refused.append((row["reference"], verdict.extracted))
    assert len(refused) <= 0.005 * len(rows), refused


@pytest.mark.parametrize(("response", "reference", "correct", "row"), CHOICES)
def test_choices(response, reference, correct, row):
    assert benchmark.verify(response, reference, SETTINGS, row).correct is correct


def test_every_reference_equals_itself():
    assert [pair for pair in PAIRS if not equal(pair.reference, pair.reference)] == []


def test_right_answers_are_right_in_both_directions():
    assert [p for p in PAIRS if p.correct and not equal(p.reference, p.answer)] == []


def test_wrong_answers_are_wrong_in_both_directions():
    assert [p for p in PAIRS if not p.correct and equal(p.reference, p.answer)] == []


@given(
    top=st.integers(1, 10**7), bottom=st.integers(3, 10**4), places=st.integers(0, 12),
    step=st.integers(-3, 3), sign=st.sampled_from(["", "-"]),
)  # fmt: skip
def test_decimals_are_equal_to_what_they_are_rounded_or_truncated_from(
    top, bottom, places, step, sign
):
    exact, place = Fraction(top, bottom), Fraction(1, 10**places)
    last = exact // place + step  # step 0 truncates; 0 or 1 rounds
    written = f"{last // 10**places}.{last % 10**places:0{places}d}" if places else str(last)
    distance = abs(last * place - exact)
    is_rounded = step == 0 or distance <= place / 2
    # 14 digits are as many as a program prints of a float.
    is_close = (
        last > 0
        and distance <= max(exact, last * place) / 10_000
        and (
            (is_rounded and place <= max(exact, last * place) / 1000)
            or (distance <= exact / 10**14 and place <= exact / 10**14)
        )
    )
    is_exact = (last * place).denominator == 1
    expected = distance == 0 or (is_close and not is_exact)
    if last >= 0:
        assert equal(sign + written, f"{sign}{top}/{bottom}") is expected
        assert equal(f"{sign}{top}/{bottom}", sign + written) is expected


@given(a=st.integers(-(10**9), 10**9), step=st.integers(0, 3))
def test_integers_are_equal_exactly(a, step):
    assert equal(f"{a:,}", str(a + step)) is (step == 0)
    assert equal(str(a + step), f"{a}.0") is (step == 0)


@given(
    top=st.integers(-99, 99), bottom=st.integers(1, 99), factor=st.integers(2, 9),
    other=st.integers(-99, 99),
)  # fmt: skip
def test_fractions_are_equal_if_their_values_are(top, bottom, factor, other):
    written = rf"\frac{{{top}}}{{{bottom}}}"
    assert equal(written, f"{top * factor}/{bottom * factor}")
    assert equal(written, rf"\dfrac{{{other}}}{{{bottom}}}") is (top == other)


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=5), st.randoms())
def test_order_counts_in_tuples_and_not_in_sets(items, random):
    shuffled = random.sample(items, len(items))
    first, second = (", ".join(map(str, each)) for each in (items, shuffled))
    assert equal(rf"\{{{first}\}}", rf"\{{{second}\}}")
    assert equal(f"({first})", f"({second})") is (items == shuffled)


def test_no_text_reaches_the_evaluation_of_sympy(no_evaluation):
    """Holds for all tests of this module; here for texts that try."""
    for text in [
        "__import__('os').system('true')", r"\text{__import__('os')}+1", r"x_{__import__('os')}",
        r"f(__import__('os'))", r"\operatorname{exec}(1)", r"\overline{exec(1)}", "x+exec(1)",
        r"\frac{d}{dx}(x)", r"\sum_{n=1}^{2} n", "lambda: 1", "x.__class__", "1 if 1 else 2",
        "x=1,234", "1,234+x", "f(1,234)", "1.5e3x", "10\\%x", "007x", "0,5x", "5 000x",
    ]:  # fmt: skip
        assert not equal(text, "y+1")
    assert expressions.parse("1,234+x") is not None
    assert not no_evaluation
    sympy.sympify("1 + x")
    assert no_evaluation  # the trap works
    no_evaluation.clear()
