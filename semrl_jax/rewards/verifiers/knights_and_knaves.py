"""Knights and knaves: who is what, in `<think>...</think><answer>...</answer>`.

The score is the sum of the format, 1 or -1, and the answer: 2 if everybody is named rightly, -1.5
if somebody is not, -2 if the format is wrong or somebody of the reference is not named.
`rewards.mode` has no influence.

Reference and answer name one person per line, such as "(1) Zoey is a knave".

Source: the scorer for these puzzles in the reference implementation (hf618/VERL, 3de68f1).
"""

from __future__ import annotations

import re

from semrl_jax.rewards.verdict import Verdict, VerifierSettings
from semrl_jax.rewards.verifiers.think_answer import tagged_answer

PERSON = re.compile(r"\b(\w+) is an? (knight|knave)\b", re.IGNORECASE)


def verify(response: str, reference: str, settings: VerifierSettings) -> Verdict:
    """Scores the roles between the answer tags; `boxed` says whether the format is right."""
    answer = tagged_answer(response)
    expected, found = roles(reference), roles(answer or "")
    correct = bool(expected) and found == expected
    formatted = answer is not None
    of_answer = 2.0 if correct else -1.5
    if not formatted or not expected.keys() <= found.keys():
        of_answer = -2.0
    return Verdict(of_answer + (1.0 if formatted else -1.0), correct, formatted, answer)


def roles(text: str) -> dict[str, str]:
    """The role of each person, in lower case; the last one counts."""
    return {name.lower(): role.lower() for name, role in PERSON.findall(text)}
