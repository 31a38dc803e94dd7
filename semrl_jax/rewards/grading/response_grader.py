"""The grader of responses, for training and evaluation: finds the answer and compares it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from semrl_jax.rewards.extraction import find_answer, first_sentence, has_complete_box, is_boxed
from semrl_jax.rewards.grading import choice, expressions
from semrl_jax.rewards.grading.answers import equal
from semrl_jax.rewards.grading.text import MAX_CHARS, normalized
from semrl_jax.rewards.last_number import only_number
from semrl_jax.support.end_markers import response_text

KINDS = ("math", "number", "choice")
LETTERS = "ABCDE"
_LABEL = re.compile(r"([A-HJ])(?:[.)]\s+(.+))?")  # a reference that is an option: `C`, `C. 12`
_RENAME = "; rename the column if it means something else"
_SENTENCE = re.compile(r"[A-Z][a-z']*\s+[a-zA-Z']+")


class Graded(NamedTuple):
    """What the grader says of a response."""

    correct: bool  # whether the answer equals a reference
    boxed: bool  # whether the response has a complete box, see `has_complete_box`
    # The answer; None if there is none. For a choice, the letters, or what is in the box if that
    # names none.
    extracted: str | None
    error: str = ""  # "too_long" if the answer has more than 4096 characters


def grade(response: str, reference: str, row: Mapping[str, Any] | None = None) -> Graded:
    """Grades a response by its answer. Hostile text may run long: use the pool.

    Args:
      reference: the right answer, LaTeX or text, without a box.
      row: may have these keys, of the columns of the prompt; ValueError for a wrong value:
        kind: "math" (the default), "number" (words around the only number of an answer do not
          count) or "choice" (the answer is a letter). If the reference is one capital letter, it
          may also be the letter of an option that the response names.
        letters: those that may be chosen; "ABCDE" by default.
        choices: the texts of the options, in the order of the letters.
        references: further right answers, in addition to the reference.
        percent: true if numbers that differ by a factor of 100 are equal, see `numbers_equal`.
    """
    row = row or {}
    kind, references = _checked(row, reference)
    boxed = has_complete_box(response)
    extracted = find_answer(response)
    has_box = is_boxed(response)
    if kind == "choice" and not has_box:
        extracted = None  # letters are not found as numbers are
    if max(len(extracted or ""), len(reference)) > MAX_CHARS:
        return Graded(False, boxed, None, "too_long")
    if kind == "choice":
        extracted, correct = _choice(response_text(response), extracted, references, row)
        return Graded(correct, boxed, extracted)
    percent = bool(row.get("percent"))
    candidates = _candidates(extracted, kind, has_box) if extracted else []
    labels = [found for right in references if (found := _LABEL.fullmatch(normalized(right)))]
    chosen = ""
    if labels:
        chosen = choice.letters_of_answer(response_text(response), extracted if has_box else None)
    if chosen:  # before equality: `B. = C` would be both options
        return Graded(chosen in [label[1] for label in labels], boxed, chosen)
    right_texts = [*references, *(label[2] for label in labels if label[2])]
    if any(equal(a, right, percent=percent) for a in candidates for right in right_texts):
        return Graded(True, boxed, extracted)
    return Graded(False, boxed, candidates[0] if candidates else extracted)


def prepare() -> None:
    """Imports the parser of expressions, before the first deadline starts."""
    expressions.prepare()


def _checked(row: Mapping[str, Any], reference: str) -> tuple[str, list[str]]:
    """The kind, and all right answers."""
    kind = row.get("kind") or KINDS[0]
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} of the row must be one of {', '.join(KINDS)}{_RENAME}")
    letters = row.get("letters") or LETTERS
    if not isinstance(letters, str) or not re.fullmatch("[A-Z]+", letters):
        raise ValueError(f"letters={letters!r:.50} of the row must be capital letters{_RENAME}")
    for name in ("references", "choices"):
        values = row.get(name) or []
        if not (isinstance(values, list) and all(isinstance(v, str | int | float) for v in values)):
            raise ValueError(f"{name}={values!r:.50} of the row must be a list of texts{_RENAME}")
    return kind, [reference, *map(str, row.get("references") or [])]


def _choice(
    response: str, box: str | None, references: list[str], row: Mapping[str, Any]
) -> tuple[str | None, bool]:
    """The letters or the box of a response, and whether they are one of the references."""

    def compared(answer: str, reference: str) -> bool:
        return equal(answer, reference, percent=bool(row.get("percent")))

    letters = row.get("letters") or LETTERS
    choices = tuple(map(str, row.get("choices") or ()))
    chosen = choice.chosen_letters(response, box, letters, choices, compared)
    for right in references:
        of_right = choice.reference_letters(right, letters, choices, compared)
        # A reference may be the text of an option, of which no letter is known.
        if chosen == of_right if of_right else box is not None and compared(box, right):
            return chosen or box, True
    return chosen or box or None, False


def _candidates(extracted: str, kind: str, boxed: bool) -> list[str]:
    """The answer, without a box its first sentence; of a sentence or number, the only number."""
    answer = extracted if boxed else first_sentence(extracted)
    if kind == "number" or _SENTENCE.match(answer):
        return [answer, only_number(answer) or answer]
    return [answer]
