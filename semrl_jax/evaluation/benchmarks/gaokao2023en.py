"""Gaokao 2023 in English and American examinations of 2023: 385 problems.

Some have options "(A) ..." or "(F) ..." in the question, and a letter as answer. Two have no
answer; every response to them is wrong, as in the reference implementation.
"""

from typing import Any

from semrl_jax.evaluation.benchmark import (
    Benchmark,
    Problem,
    optional_text,
    options_in,
    text,
    without_dollars,
)

NO_ANSWER = "(none published)"
_LETTERS = ("ABCDE", "FGHJK", "ABCD", "FGHJ")


def answer_of(row: dict[str, Any]) -> str:
    return NO_ANSWER if row.get("answer") == "" else text(row, "answer")


def read(row: dict[str, Any]) -> Problem:
    question, answer = text(row, "question"), without_dollars(answer_of(row))
    problem = Problem(question, answer, optional_text(row, "sourcename"))
    for letters in _LETTERS if len(answer) == 1 else ():
        choices = options_in(question, letters, r"\(L\)") if answer in letters else ()
        if choices:
            return problem._replace(kind="choice", letters=letters, choices=choices)
    return problem


BENCHMARK = Benchmark(385, read)
