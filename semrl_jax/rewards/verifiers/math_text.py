"""MATH: the text in the last complete box must be the reference, both normalised. 1 or 0.

Faster than `math`, and stricter: 1/2 and 0.5 differ. `rewards.mode` has no influence.

Source: the scorer of MATH in verl, which the release takes over; the normalisation is ours, see
`grading.text.normalized`.
"""

from __future__ import annotations

from semrl_jax.rewards.extraction import find_answer, has_complete_box
from semrl_jax.rewards.grading.text import MAX_CHARS, normalized, same_text
from semrl_jax.rewards.verdict import Verdict, VerifierSettings


def verify(response: str, reference: str, settings: VerifierSettings) -> Verdict:
    """Scores the text in the last box; wrong without a complete box."""
    boxed = has_complete_box(response)
    answer = find_answer(response) if boxed else None
    if answer and max(len(answer), len(reference)) > MAX_CHARS:
        return Verdict(0.0, False, boxed, None, "too_long")
    answer = normalized(answer) if answer else None
    correct = bool(answer) and same_text(answer, normalized(reference))
    return Verdict(float(correct), correct, boxed, answer)
