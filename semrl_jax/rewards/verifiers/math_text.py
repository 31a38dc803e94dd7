"""MATH: the text in the last complete box must be the reference, both normalised. 1 or 0.

Much faster than `math`, and stricter: 1/2 and 0.5 differ. `rewards.mode` has no influence.

Source: the scorer of MATH in verl, which the release takes over; the normalisation is ours, see
`normalize_answer`.
"""

from __future__ import annotations

from semrl_jax.rewards.extraction import extract_answer, has_complete_box, normalize_answer
from semrl_jax.rewards.verdict import Verdict, VerifierSettings


def verify(response: str, reference: str, settings: VerifierSettings) -> Verdict:
    """Scores the text in the last box; wrong without a complete box."""
    boxed = has_complete_box(response)
    answer = extract_answer(response) if boxed else None
    correct = bool(answer) and answer == normalize_answer(reference)
    return Verdict(float(correct), correct, boxed, answer)


def prepare() -> None:
    """Nothing to prepare."""
