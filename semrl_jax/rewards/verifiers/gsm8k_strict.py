"""GSM8K: the number after the last `####` must be the reference. 1 if it is, else 0.

`rewards.mode` has no influence.

Source: the strict mode of verl's scorer for GSM8K, which the release takes over; it compares texts
without commas and currency. Here 42 and 42.0 are equal too.
"""

from __future__ import annotations

import re

from semrl_jax.rewards.grading.numbers import parse_number
from semrl_jax.rewards.grading.text import MAX_CHARS, normalized
from semrl_jax.rewards.verdict import Verdict, VerifierSettings

# A sign after a digit or letter is a minus or a dash: 3-5 has the numbers 3 and 5.
NUMBER = r"(?:(?<![\w)\]}.])[-+−–])?(?:[$€£¥][-−]?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
MARKED = re.compile(rf"####\s*({NUMBER})")


def verify(response: str, reference: str, settings: VerifierSettings) -> Verdict:
    """Scores the number after the last mark; `boxed` says whether there is one."""
    return verdict_of_number(MARKED.findall(response), reference)


def verdict_of_number(found: list[str], reference: str) -> Verdict:
    """Compares the last number found; the reference may be a number or a GSM8K solution."""
    is_long = bool(found) and len(found[-1]) > MAX_CHARS
    answer = normalized(found[-1]).replace(",", "") if found and not is_long else None
    if answer and "." in answer:
        answer = answer.rstrip("0").rstrip(".")
    marked = MARKED.findall(reference)
    number = parse_number(answer) if answer else None
    right = parse_number(normalized(marked[-1] if marked else reference))
    correct = None not in (number, right) and number.value == right.value
    return Verdict(float(correct), correct, bool(found), answer, "too_long" if is_long else "")
