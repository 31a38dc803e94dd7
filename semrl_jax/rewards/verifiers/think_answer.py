"""Mathematics in `<think>...</think><answer>...</answer>`: answer and format are scored.

Correct: 1 in this format, 0.5 otherwise. Wrong: -0.5 in this format, -1 otherwise. `rewards.mode`
has no influence.

Source: the scorer for this format in the reference implementation (hf618/VERL, 3de68f1).
"""

from __future__ import annotations

from semrl_jax.rewards.grading import grade, prepare
from semrl_jax.rewards.verdict import Verdict, VerifierSettings

__all__ = ["prepare", "tagged_answer", "verify"]

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def verify(response: str, reference: str, settings: VerifierSettings) -> Verdict:
    """Scores the answer between the tags, or what `find_answer` finds without them."""
    tagged = tagged_answer(response)
    formatted = tagged is not None
    graded = grade(f"<answer>{tagged}</answer>" if formatted else response, reference)
    score = (1.0 if formatted else 0.5) if graded.correct else (-0.5 if formatted else -1.0)
    return Verdict(score, *graded._replace(boxed=formatted))


def tagged_answer(response: str) -> str | None:
    """The text of the answer if each tag stands once, in order; `<think>` may be in the prompt."""
    if not response.lstrip().startswith(TAGS[0]):
        response = TAGS[0] + response
    if any(response.count(tag) != 1 for tag in TAGS):
        return None
    places = [response.index(tag) for tag in TAGS]
    if places != sorted(places):
        return None
    return response[places[2] + len(TAGS[2]) : places[3]].strip()
