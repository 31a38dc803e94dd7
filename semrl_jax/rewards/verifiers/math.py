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
from semrl_jax.rewards.verdict import Verdict, VerifierSettings, verdict_score


def verify(response: str, reference: str, settings: VerifierSettings) -> Verdict:
    """Scores a response against the reference answer. Hostile text may run long: use the pool.

    Args:
      response: response text without the prompt.
      reference: the right answer, LaTeX without a box.
      settings: `mode` and `unboxed_penalty` decide on the score, see `verdict_score`. An answer of
        more than `max_answer_chars` is not parsed and is wrong, with error "too_long".

    Returns:
      A verdict; `extracted` is None if the response has no answer.
    """
    boxed = has_complete_box(response)
    answer = extract_answer(response)
    error = ""
    if answer is None or not answer:
        correct = False
    elif max(len(answer), len(reference)) > settings.max_answer_chars:
        correct, error, answer = False, "too_long", None
    else:
        correct = answers_match(answer, reference)
    return Verdict(verdict_score(correct, boxed, settings), correct, boxed, answer, error)


def prepare() -> None:
    """Imports sympy and builds the parser, which takes up to a second."""
    answers_match("\\frac{1}{2}", "0.3")


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
