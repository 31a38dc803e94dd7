"""Mathematical equality of answers, by math-verify.

The time limits of math-verify are off: with them, a timeout would silently become a wrong answer.
The pool's limit holds instead. It also ends computations that no signal interrupts.
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
from semrl_jax.rewards.verdict import Verdict, verdict_score


def verify_math(
    response: str,
    reference: str,
    *,
    mode: str = "independent",
    unboxed_penalty: float = -1.0,
    max_answer_chars: int = 4096,
) -> Verdict:
    """Scores a response against the reference answer. Hostile text may run long: use the pool.

    Args:
      response: response text without the prompt.
      reference: the right answer, LaTeX without a box.
      mode, unboxed_penalty: see `verdict_score`.
      max_answer_chars: a longer answer is not parsed and is wrong, with error "too_long".

    Returns:
      A verdict; `extracted` is None if the response has no answer.
    """
    boxed = has_complete_box(response)
    answer = extract_answer(response)
    error = ""
    if answer is None or not answer:
        correct = False
    elif max(len(answer), len(reference)) > max_answer_chars:
        correct, error, answer = False, "too_long", None
    else:
        correct = answers_match(answer, reference)
    score = verdict_score(correct, boxed, mode=mode, unboxed_penalty=unboxed_penalty)
    return Verdict(score, correct, boxed, answer, error)


@functools.lru_cache(maxsize=8192)
def answers_match(answer: str, reference: str) -> bool:
    """Whether a normalised answer equals the reference answer.

    Equal texts are equal. math-verify compares all others, as \\boxed{answer} and
    \\boxed{reference}. This is not symmetric: only the reference keeps `%`.
    """
    if answer and answer == normalize_answer(reference):
        return True
    parse, verify = _math_verify()
    gold = parse(f"\\boxed{{{expand_scientific(reference)}}}", parsing_timeout=None)
    prediction = parse(f"\\boxed{{{expand_scientific(answer)}}}", parsing_timeout=None)
    return bool(verify(gold, prediction, timeout_seconds=None))


@functools.cache
def _math_verify():
    """math-verify, imported at the first use: with sympy this takes up to a second."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off
    return math_verify.parse, math_verify.verify
