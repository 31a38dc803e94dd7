"""The scorers of other formats, and the pool that finds them by name."""

import pytest

from semrl_jax.rewards import VerifierPool, VerifierSettings
from semrl_jax.rewards.verifiers import (
    gsm8k_flexible,
    gsm8k_strict,
    knights_and_knaves,
    math_text,
    think_answer,
)
from semrl_jax.support.modules import module_names

SETTINGS = VerifierSettings()
PUZZLE = "(1) Zoey is a knave\n(2) Oliver is a knight"
SOLVED = "<think>hm</think><answer>(1) Zoey is a knave (2) Oliver is a knight</answer>"


@pytest.mark.parametrize(
    ("verifier", "response", "reference", "score", "correct", "extracted"),
    [
        (gsm8k_strict, "2 + 40 = 42 #### 42", "42", 1, True, "42"),
        (gsm8k_strict, "#### 1 no, #### $1,042.00", "so #### 1042", 1, True, "1042"),
        (gsm8k_strict, "#### -7.", "-7", 1, True, "-7"),
        (gsm8k_strict, "#### 41", "42", 0, False, "41"),
        (gsm8k_strict, "#### +5", "5", 1, True, "+5"),
        (gsm8k_strict, "#### .5", "0.5", 1, True, "0.5"),
        (gsm8k_strict, "#### $-5", "-5", 1, True, "-5"),
        (gsm8k_strict, "#### \u22125", "5", 0, False, "-5"),
        (gsm8k_flexible, "so it is \u22123", "-3", 1, True, "-3"),
        (gsm8k_flexible, "pages 3-5", "-5", 0, False, "5"),
        (gsm8k_strict, "the answer is 42", "42", 0, False, None),
        (gsm8k_strict, "#### x", "42", 0, False, None),
        (gsm8k_flexible, "the answer is 42", "42", 1, True, "42"),
        (gsm8k_flexible, "42, then 43", "42", 0, False, "43"),
        (gsm8k_flexible, "it costs $3.50.", "3.5", 1, True, "3.5"),
        (gsm8k_flexible, "no idea", "42", 0, False, None),
        (gsm8k_flexible, "9" * 10**6, "42", 0, False, None),
        (math_text, r"so \boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1, True, r"\frac{1}{2}"),
        (math_text, r"\boxed{1}, no, \boxed{2}", "2", 1, True, "2"),
        (math_text, r"\boxed{1} or \boxed{2}", "2", 0, False, "1, 2"),
        (math_text, r"so \boxed{0.5}", r"\frac{1}{2}", 0, False, "0.5"),
        (math_text, "so 2", "2", 0, False, None),
        (think_answer, "<think>x</think><answer>0.5</answer>", r"\frac12", 1, True, "0.5"),
        (think_answer, r"x</think><answer>\boxed{3}</answer>", "3", 1, True, "3"),
        (think_answer, r"so \boxed{3}", "3", 0.5, True, "3"),
        (think_answer, "<think>x</think><answer>4</answer>", "3", -0.5, False, "4"),
        (think_answer, "<answer>3</answer><think>x</think>", "4", -1, False, "3"),
        (think_answer, "no", "3", -1, False, None),
        (knights_and_knaves, SOLVED, PUZZLE, 3, True, SOLVED[25:-9]),
        (knights_and_knaves, SOLVED.replace("knave", "knight"), PUZZLE, -0.5, False, ...),
        (knights_and_knaves, SOLVED.replace("Zoey", "Zac"), PUZZLE, -1, False, ...),
        (knights_and_knaves, SOLVED.replace("</think>", ""), PUZZLE, -3, False, None),
        (knights_and_knaves, "", "", -3, False, None),
    ],
)
def test_scores_by_hand(verifier, response, reference, score, correct, extracted):
    verdict = verifier.verify(response, reference, SETTINGS)
    assert (verdict.score, verdict.correct) == (score, correct)
    assert extracted is ... or verdict.extracted == extracted


def test_all_are_found_by_name():
    names = module_names("semrl_jax.rewards.verifiers")
    assert {"math", "gsm8k_strict", "gsm8k_flexible", "math_text", "think_answer"} < set(names)
    with VerifierPool(num_workers=1, timeout_s=20.0, function="gsm8k_strict") as pool:
        assert pool.submit("#### 7", "7").result().score == 1
        assert pool.submit(r"\boxed{7}", "7").result().score == 0


@pytest.mark.parametrize("text", ["#### " + "1," * 50_000, "<answer>" * 20_000, "a is a " * 20_000])
def test_long_texts_take_no_time(text):
    """Each pattern reads a text once; one that tried all splits would take minutes here."""
    for verifier in (gsm8k_strict, gsm8k_flexible, math_text, think_answer, knights_and_knaves):
        assert not verifier.verify(text, "7", SETTINGS).correct
