"""Answers of benchmarks: 1 if the answer equals the reference by the rules of `grading`, else 0.

`rewards.mode` has no influence. The row of the prompt may have these keys, and may lack all:

  kind: "math" (the default), "number" (words beside the only number of an answer do not count) or
    "choice" (the answer is a letter).
  letters: those that may be chosen; "ABCDE" by default.
  choices: the texts of the options, in the order of the letters.
  references: further right answers beside the reference.
  percent: true if numbers that differ by a factor of 100 are equal, see `numbers_equal`.

Source: the evaluation protocol of the reference implementation (hf618/VERL, 3de68f1). Departures:
exact numbers must be equal exactly, factors of 100 need a percent sign or `percent`, and equality
of expressions is shown by their values, not by `simplify`, whose time has no bound.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from semrl_jax.end_markers import response_text
from semrl_jax.rewards.extraction import find_answer, has_complete_box
from semrl_jax.rewards.grading import choice, expressions
from semrl_jax.rewards.grading.answers import equal
from semrl_jax.rewards.grading.text import MAX_CHARS
from semrl_jax.rewards.verdict import Verdict, VerifierSettings

KINDS = ("math", "number", "choice")
LETTERS = "ABCDE"
_RENAME = "; rename the column if it means something else"
_SENTENCE = re.compile(r"(?<=[^\s\d])[.](?=\s|$)|[.](?=\s*[A-Z])|。|\s(?:so|because|since)\b")
_NUMBER = re.compile(r"-?(?<![\d.])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?\s*\\?%?")


def verify(
    response: str, reference: str, settings: VerifierSettings, row: Mapping[str, Any] | None = None
) -> Verdict:
    """Scores a response by its answer. Hostile text may run long: use the pool.

    Args:
      response: response text without the prompt.
      reference: the right answer as the benchmark writes it.
      settings: not used.
      row: keys as above, of the columns of the prompt.

    Returns:
      A verdict; `extracted` is the answer that was found. For a choice these are the letters, or
      what is in the box if that names none.

    Raises:
      ValueError: if a key of the row has a wrong value.
    """
    row = row or {}
    kind, references = _checked(row, reference)
    boxed = has_complete_box(response)
    has_box = "boxed" in response_text(response)  # perhaps without its end
    extracted = find_answer(response)
    if kind == "choice" and not has_box:
        extracted = None  # letters are not found as numbers are
    if extracted is not None and len(extracted) > MAX_CHARS:
        return Verdict(0.0, False, boxed, None, "too_long")
    if kind == "choice":
        extracted, correct = _choice(response_text(response), extracted, references, row)
        return Verdict(float(correct), correct, boxed, extracted)
    if extracted is None:
        return Verdict(0.0, False, boxed, None)
    candidates = _candidates(extracted, kind, has_box)
    compared = _equal_with(row)
    correct = any(compared(answer, right) for answer in candidates for right in references)
    return Verdict(float(correct), correct, boxed, extracted)


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
        if not isinstance(values, list) or not all(
            isinstance(v, (str, int, float)) for v in values
        ):
            raise ValueError(f"{name}={values!r:.50} of the row must be a list of texts{_RENAME}")
    return kind, [reference, *map(str, row.get("references") or [])]


def _equal_with(row: Mapping[str, Any]):
    percent = bool(row.get("percent"))
    return lambda answer, reference: equal(answer, reference, percent=percent)


def _choice(
    response: str, box: str | None, references: list[str], row: Mapping[str, Any]
) -> tuple[str | None, bool]:
    """The letters or the box of a response, and whether they are one of the references."""
    letters = row.get("letters") or LETTERS
    choices, compared = tuple(map(str, row.get("choices") or ())), _equal_with(row)
    chosen = choice.chosen_letters(response, box, letters, choices, compared)
    for right in references:
        of_right = choice.reference_letters(right, letters, choices, compared)
        # A reference may be the text of an option, of which no letter is known.
        if chosen == of_right if of_right else box is not None and compared(box, right):
            return chosen or box, True
    return chosen or box or None, False


def _candidates(extracted: str, kind: str, boxed: bool) -> list[str]:
    """The answer as it was found; without a box, also its first sentence; of numbers, the only."""
    candidates = [extracted]
    if not boxed:
        first = _SENTENCE.split(extracted.strip(), maxsplit=1)[0]
        candidates.append(first)
    if kind == "number":
        for candidate in tuple(candidates):
            numbers = _NUMBER.findall(candidate)
            if len(numbers) == 1:
                candidates.append(numbers[0])
    return list(dict.fromkeys(candidates))
