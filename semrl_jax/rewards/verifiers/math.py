"""Mathematical equality of answers, by math-verify.

The time limits of math-verify are off: with them, a timeout would silently become a wrong answer.
The pool's limit holds instead. It also ends computations that no signal interrupts. math-verify is
imported at its first use, because with sympy this takes up to a second.
"""

from __future__ import annotations

import functools
import logging

from semrl_jax.rewards.extraction import (
    expand_scientific,
    extract_answer,
    has_complete_box,
    normalize_answer,
)
from semrl_jax.rewards.verdict import Verdict, VerifierSettings, verdict_score

MAX_ANSWER_CHARS = 4096  # a longer answer is wrong without being parsed, error "too_long"

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off


def verify(response: str, reference: str, settings: VerifierSettings) -> Verdict:
    """Scores a response against the reference answer. Hostile text may run long: use the pool.

    Args:
      response: response text without the prompt.
      reference: the right answer, LaTeX without a box.
      settings: `mode` and `unboxed_penalty` decide on the score, see `verdict_score`.

    Returns:
      A verdict; `extracted` is None if the response has no answer.
    """
    boxed = has_complete_box(response)
    answer = extract_answer(response)
    error = ""
    if not answer:
        correct = False
    elif max(len(answer), len(reference)) > MAX_ANSWER_CHARS:
        correct, error, answer = False, "too_long", None
    else:
        correct = answers_match(answer, reference)
    return Verdict(verdict_score(correct, boxed, settings), correct, boxed, answer, error)


def prepare() -> None:
    """Imports math-verify and builds its parser, before the first deadline starts."""
    answers_match("\\frac{1}{2}", "0.3")


@functools.lru_cache(maxsize=8192)
def answers_match(answer: str, reference: str) -> bool:
    """Whether a normalised answer equals the reference answer.

    Equal texts are equal. math-verify compares all others, as \\boxed{answer} and
    \\boxed{reference}. This is not symmetric: only the reference keeps `%`.
    """
    if answer and answer == normalize_answer(reference):
        return True
    import math_verify

    gold, prediction = (
        math_verify.parse(f"\\boxed{{{expand_scientific(text)}}}", parsing_timeout=None)
        for text in (reference, answer)
    )
    return bool(math_verify.verify(gold, prediction, timeout_seconds=None))
