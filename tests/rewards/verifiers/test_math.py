"""Verdicts of the grader against recorded ones of math-verify, and the score table."""

import json

import pytest

from semrl_jax.rewards import Verdict, VerifierSettings
from semrl_jax.rewards.verifiers import math


def verify(response, reference, **settings):
    return math.verify(response, reference, VerifierSettings(**settings))


# The reference implementation calls these wrong; they are right.
KNOWN_FALSE_NEGATIVES = {
    (r"\boxed{10\%}", r"10\%"), (r"\boxed{10\%}", "0.1"), (r"\boxed{1e3}", "1000")
}  # fmt: skip


def test_verdicts_match_reference(golden):
    rows = [json.loads(line) for line in (golden / "rewards.jsonl").read_text().splitlines()]
    assert len(rows) == 48
    seen = set()
    for row in rows:
        key = row["response"], row["answer"]
        independent = verify(*key)
        mix = verify(*key, mode="mix")
        if key in KNOWN_FALSE_NEGATIVES:
            seen.add(key)
            assert not row["correct"]
            assert (independent.score, independent.correct, mix.score) == (1.0, True, 1.0), key
        else:
            actual = (independent.score, independent.correct, mix.score)
            assert actual == (row["score_independent"], row["correct"], row["score_mix"]), key
        assert not independent.error
    assert seen == KNOWN_FALSE_NEGATIVES


@pytest.mark.parametrize(
    ("mode", "scores"), [("independent", [1.0, 0.5, -0.5, -2.0]), ("mix", [1.0, 1.0, 0.0, 0.0])]
)
def test_score_table(mode, scores):
    responses = [r"\boxed{7}", "7", r"\boxed{8}", "8"]
    verdicts = [verify(r, "7", mode=mode, unboxed_penalty=-2.0) for r in responses]
    assert [v.score for v in verdicts] == scores
    assert [v.correct for v in verdicts] == [True, True, False, False]
    assert [v.boxed for v in verdicts] == [True, False, True, False]
    assert [v.extracted for v in verdicts] == ["7", "7", "8", "8"]


def test_arithmetic_response_is_right_by_its_box():
    response = "380+882:0+2+0=02,8+8+0=16,3+8+1=12;1262\n\\boxed{1262}"
    assert verify(response, "1262") == Verdict(1.0, True, True, "1262")
    assert verify(response, "1162") == Verdict(-0.5, False, True, "1262")


def test_a_long_answer_is_never_parsed():
    long = Verdict(-0.5, False, True, None, "too_long")
    assert verify(r"\boxed{" + "(" * 5000 + "}", "7") == long
    assert verify(r"\boxed{7}", "7" * 5000) == long
