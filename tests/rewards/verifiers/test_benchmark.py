"""The verifier of benchmarks: its row, its extraction, and hostile responses in the pool."""

import json
import time

import pytest

from semrl_jax.rewards import Verdict, VerifierPool, VerifierSettings
from semrl_jax.rewards.verdict import failed_verdict
from semrl_jax.rewards.verifiers import benchmark
from tests.cases import raised

SETTINGS = VerifierSettings(function="benchmark")


def verify(response, reference, **row):
    return benchmark.verify(response, reference, SETTINGS, row)


def test_the_score_has_no_part_of_the_mode():
    for mode in ("independent", "mix"):
        settings = VerifierSettings(mode, function="benchmark")
        for response, verdict in [
            (r"\boxed{7}", Verdict(1.0, True, True, "7")), ("so 7", Verdict(1.0, True, False, "7")),
            ("so 8", Verdict(0.0, False, False, "8")), ("no", Verdict(0.0, False, False, None)),
        ]:  # fmt: skip
            assert benchmark.verify(response, "7", settings) == verdict
        assert failed_verdict(settings, "", "timeout").score == 0.0
    assert failed_verdict(VerifierSettings(), "", "timeout").score == -1.0


@pytest.mark.parametrize(
    ("response", "reference", "correct"),
    [
        ("The answer is 7. Because it is odd.", "7", True),
        ("The answer is $\\frac{1}{2}$.\nIndeed, 0.5.", "0.5", True),
        ("The answer is 3.5 because", "3.5", True), ("答案是 7。因为", "7", True),
        ("total 3 apples and 4 pears, so 7", "7", True), ("so #### 1,234", "1234", True),
        (r"\boxed{10\%}", "0.1", True), ("<|im_end|>7", "7", False),
        (r"\boxed{8} The answer is 7", "7", False),
    ],
)  # fmt: skip
def test_the_answer_is_found(response, reference, correct):
    assert verify(response, reference).correct is correct


@pytest.mark.parametrize(
    ("response", "value"),
    [
        (r"\boxed{B. = C}", "B"), (r"\boxed{A. = B \approx C}", "A"),
        ("Answer: B. I choose C.", "C"), (r"Answer: B \approx D. I choose C.", "C"),
        (r"\boxed{7 \text{ apples} \approx 11}", "11"), (r"\boxed{7 \approx \text{11}}", "11"),
        (r"\boxed{7 \approx eleven}", "11"), (r"\boxed{Alice has 7 = eleven}", "11"),
        (r"\boxed{5\sqrt{2} \approx 7.07}", r"5\sqrt{2}"),
    ],
)  # fmt: skip
def test_a_response_has_one_answer(response, value):
    for reference in ("A", "B", "C", "D", "7", "11", r"5\sqrt{2}"):
        for kind in ("math", "number"):
            graded = verify(response, reference, kind=kind)
            assert graded.correct is (reference == value), (reference, kind)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        (r"$2\boxed{5}$", "10"), (r"$\boxed{5}^2$", "25"), (r"$\boxed{5}/\boxed{6}$", None),
        (r"It is not \boxed{5}.", None), (r"$\frac{1}{\boxed{5}}$", None),
        (r"$\sqrt{\boxed{5}}$", None), (r"$\boxed{5}^\circ$", "5"), (r"$x = \boxed{5}$.", "5"),
        (r"Step 2 \boxed{5}", "5"), (r"\mathbf{\boxed{5}}", "5"), (r"\boxed{5}!", "5"),
        (r"\boxed{5} \text{ cm}^2", "5"), (r"2. \boxed{5}", "5"),
    ],
)  # fmt: skip
def test_a_box_within_an_expression_is_not_the_answer(response, value):
    for reference in ("5", "6", "10", "25"):
        assert verify(response, reference).correct is (reference == value), reference


def test_the_only_number_counts_for_kind_number():
    response = r"\boxed{\text{She has 7 left}}"
    assert verify(response, "7", kind="number").correct
    assert not verify(response, "7").correct
    assert not verify(r"\boxed{\text{7 of 8}}", "7", kind="number").correct
    assert verify(r"\boxed{1/2}", "0.5", kind="number").correct


def test_one_of_several_references_is_enough():
    assert verify(r"\boxed{2}", "1", references=["2", 3]).correct
    assert verify(r"\boxed{3}", "1", references=["2", 3]).correct
    assert verify(r"\boxed{1}", "1", references=["2"]).correct
    assert not verify(r"\boxed{4}", "1", references=["2", 3]).correct
    assert verify(r"\boxed{B}", "A", kind="choice", references=["B"]).correct


def test_the_text_of_the_option_may_be_a_reference():
    row = {"kind": "choice", "letters": "ABCD", "references": [r"3 \sqrt{2}"]}
    assert verify(r"\boxed{3\sqrt2}", "D", **row).correct
    assert verify(r"\boxed{D}", "D", **row).correct
    assert not verify(r"\boxed{3\sqrt3}", "D", **row).correct
    assert not verify(r"\boxed{A}", "D", **row).correct


def test_percent_of_the_row():
    assert verify(r"\boxed{15}", "0.15", percent=True).correct
    assert not verify(r"\boxed{15}", "0.15").correct


def test_the_letters_are_extracted():
    row = {"kind": "choice", "letters": "ABCD", "choices": ["A. 1", "B. 2", "C. 2", "D. 4"]}
    assert verify(r"\boxed{4}", "D", **row).extracted == "D"
    assert verify(r"\boxed{2}", "B", **row).extracted == "2"  # two options
    pairs = {**row, "choices": ["A) 62, 35", "B) 62, 34", "C) 34, 62"]}
    assert verify(r"\boxed{62, 34}", "B", **pairs).extracted == "B"  # the same text comes first
    assert verify("so E", "D", **row).extracted is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"kind": "maths"}, "kind='maths' of the row must be one of math, number, choice"),
        ({"letters": "a-z"}, "letters='a-z' of the row must be capital letters"),
        ({"letters": 3}, "letters=3 of the row"), ({"choices": "AB"}, "choices='AB' of the row"),
        ({"references": [None]}, "references=.* of the row must be a list of texts"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_an_error(row, message):
    raised(ValueError, message, verify, r"\boxed{1}", "1", **row)


def test_a_long_answer_is_too_long():
    assert verify(r"\boxed{" + "1" * 5000 + "}", "1").error == "too_long"


def test_the_pool_passes_the_row():
    with VerifierPool(num_workers=1, timeout_s=3.0, function="benchmark") as pool:
        assert pool.takes_row
        row = json.dumps({"kind": "choice", "letters": "ABCDE", "choices": ["A) 5", "B) 6"]})
        assert pool.submit(r"\boxed{6}", "B", row).result(timeout=60).correct
        assert not pool.submit(r"\boxed{6}", "B").result(timeout=60).correct
        wrong = pool.submit("1", "1", '{"kind": "x"}').result(timeout=60)
        assert (wrong.score, wrong.error_kind) == (0.0, "exception")
    with VerifierPool(num_workers=1, function="math") as pool:
        assert not pool.takes_row


HOSTILE = {
    "tower": "9^{9^{9^{9}}}", "factorial": "((99!)!)!",
    "parentheses": "(" * 3000 + "1" + ")" * 3000,
    "eight bars": "|x|" * 8, "sixty bars": "|" * 60 + "x" + "|" * 60, "minus": "-" * 399,
    "fractions": r"\frac{1}{" * 9 + "2+x" + "}" * 9, "calls": "a(b+" * 9 + "c" + ")" * 9,
    "subscripts": "x_{" * 9 + "1" + "}" * 9, "powers": "x^{x^{x^{x^{x}}}}", "digits": "9" * 4000,
    "items": ",".join(f"(x+{i})^2" for i in range(64)), "pairs": "(1,2)," * 60 + "(1,2)",
    "spaces": "1" + " " * 4000 + "x", "roots": "√(" * 1300, "text": r"\text{" * 600,
    "units": "1" + "平方" * 2000 + "x", "numbers": "1,234" * 800, "relations": "x<" * 2000,
    "command": "__import__('os').system('sleep 60')",
    "matrix": r"\det{\begin{pmatrix}1&2\\3&4\end{pmatrix}}",
    "sum": r"\sum_{n=1}^{10^{10}} n", "value": "9^{9^9}|_{x=1}", "sines": r"\sin " * 60 + "x",
    "nested brackets": "[1," * 300 + "]" * 300, "null": "\x00" * 4000, "commas": "1," * 2000,
    "unit words": "1 square " * 500, "floor": r"\lfloor 10^{100000}\pi \rfloor",
}  # fmt: skip


@pytest.mark.slow
def test_hostile_responses_end_within_the_limit_and_are_wrong():
    texts = {
        **HOSTILE,
        "letters": "A" * 900_000,
        "articles": "A a " * 200_000,
        "marks": "answer is " * 90_000,
    }
    with VerifierPool(num_workers=2, timeout_s=3.0, function="benchmark") as pool:
        pool.wait_ready()
        started = time.monotonic()
        futures = {}
        for name, text in texts.items():
            boxed = rf"\boxed{{{text}}}" if name in HOSTILE else text
            for kind in ("math", "number", "choice"):
                row = json.dumps({"kind": kind})
                futures[name, kind] = pool.submit(boxed, "x+1" if kind == "math" else "B", row)
        verdicts = {key: future.result(timeout=60) for key, future in futures.items()}
        assert time.monotonic() - started < 60
        assert {key for key, verdict in verdicts.items() if verdict.correct} == set()
        late = {key for key, verdict in verdicts.items() if verdict.error_kind == "timeout"}
        assert len(late) <= 3, late  # most end on their own
        others = {v.error for v in verdicts.values()} - {"", "timeout", "too_long"}
        assert not others
        assert pool.submit(r"\boxed{7}", "7").result(timeout=60).correct
