"""Rows of Chinese examinations, whose options "A. ... B. ..." are in the question."""

from __future__ import annotations

import re
from typing import Any

from semrl_jax.evaluation.benchmark import (
    Problem,
    letters_of,
    optional_text,
    options_in,
    parts,
    text,
)

_LETTERS = "ABCD"
_OPTION = r"L\s*[.．、]"


def choice_or_text(row: dict[str, Any]) -> Problem:
    """A row with the letter in `choice_answer`, or with "" there and another answer.

    If there is a letter, `answer` has the text of the option. This text is right, too.
    """
    question, answer = text(row, "question"), text(row, "answer")
    if not optional_text(row, "choice_answer"):
        return Problem(question, answer)
    letter = letters_of(row, "choice_answer", _LETTERS)
    option = re.sub(r"^[A-D]\s*[.．]\s*", "", answer)
    return _choice(question, letter, "", (option,))


def choice_or_blank(row: dict[str, Any]) -> Problem:
    """A row of `type` "single", "multi" or "blank"."""
    question, kind = text(row, "question"), text(row, "type")
    if kind in ("single", "multi"):
        return _choice(question, letters_of(row, "answer", _LETTERS), kind)
    answer = text(row, "answer")
    return Problem(question, answer, kind, references=parts(answer))


def _choice(question: str, letters: str, kind: str, references: tuple[str, ...] = ()) -> Problem:
    choices = options_in(question, _LETTERS, _OPTION)
    return Problem(question, letters, kind, "choice", _LETTERS, choices, references)
