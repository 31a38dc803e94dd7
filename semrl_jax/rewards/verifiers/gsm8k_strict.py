"""GSM8K: the number after the last `####` must be the reference. 1 if it is, else 0.

`rewards.mode` has no influence.

Source: the strict mode of verl's scorer for GSM8K, which the release takes over; it compares texts
without commas and currency. Here 42 and 42.0 are equal too.
"""

from __future__ import annotations

import re

from semrl_jax.rewards.verdict import Verdict, VerifierSettings

NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
MARKED = re.compile(rf"####\s*({NUMBER})")


def verify(response: str, reference: str, settings: VerifierSettings) -> Verdict:
    """Scores the number after the last mark; `boxed` says whether there is one."""
    return verdict_of_number(MARKED.findall(response), reference)


def verdict_of_number(found: list[str], reference: str) -> Verdict:
    """Compares the last number found; the reference may be a number or a GSM8K solution."""
    answer = plain_number(found[-1]) if found else None
    marked = MARKED.findall(reference)
    correct = answer is not None and answer == plain_number(marked[-1] if marked else reference)
    return Verdict(float(correct), correct, answer is not None, answer)


def plain_number(text: str) -> str:
    """Without commas, currency, spaces and zeros after the point."""
    text = text.translate(str.maketrans("", "", ",$ ")).rstrip(".")
    return text.rstrip("0").rstrip(".") if "." in text else text


def prepare() -> None:
    """Nothing to prepare."""
