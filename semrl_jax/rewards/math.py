"""Mathematical equality of answers, by math-verify.

math-verify is told to set no time limits: its own end without a trace, as a wrong answer. The limit
that holds is the pool's, which also ends what no signal interrupts.
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
    """Scores a response against the reference answer. May run long: hostile text needs the pool.

    Args:
      response: response text without the prompt.
      reference: the right answer, LaTeX without a box.
      mode, unboxed_penalty: see `verdict_score`.
      max_answer_chars: a longer answer is wrong, error "too_long", and is never parsed.

    Returns:
      A verdict; `extracted` is None where the response names no answer.
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

    Equal text is equal. All else goes to math-verify as \\boxed{answer} against \\boxed{reference}.
    Not symmetric: math-verify takes `x=3` for `3` either way, but the reference alone keeps `%`.
    """
    if answer and answer == normalize_answer(reference):
        return True
    parse, verify = _math_verify()
    gold = parse(f"\\boxed{{{expand_scientific(reference)}}}", parsing_timeout=None)
    prediction = parse(f"\\boxed{{{expand_scientific(answer)}}}", parsing_timeout=None)
    return bool(verify(gold, prediction, timeout_seconds=None))


@functools.cache
def _math_verify():
    """math-verify, imported when first needed: with sympy it takes up to a second."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its limits are off
    return math_verify.parse, math_verify.verify
