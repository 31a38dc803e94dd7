"""Repetition in the responses: repeated n-grams, and texts that end in a loop."""

from __future__ import annotations

import re
from collections.abc import Sequence

import ml_collections

from semrl_jax.evaluation.protocols import PerProblem
from semrl_jax.evaluation.repeated import over_responses, plan
from semrl_jax.evaluation.samples import Sample

__all__ = ["per_problem", "plan"]

NGRAM = 4
MAX_PERIOD = 400  # characters of one turn of a loop
MIN_TURNS = 3
MIN_CHARACTERS = 60  # of the loop, so that "000" or "..." is none
_WORD = re.compile(r"[a-zA-Z]+|\d+|[^\sa-zA-Z\d]")  # each Chinese character is a word


def per_problem(
    problems: Sequence[Sequence[Sample]], options: ml_collections.ConfigDict
) -> dict[str, PerProblem]:
    """Means over all sampled responses.

    Returns:
      `responses/repeated_ngrams`: share of a response's 4-grams that occurred in it before.
      `responses/loop_fraction`: share of the responses that end in a loop.
    """
    return {
        "responses/repeated_ngrams": over_responses(problems, lambda s: repeated(s.response)),
        "responses/loop_fraction": over_responses(problems, lambda s: float(loops(s.response))),
    }


def repeated(text: str) -> float:
    """1 - distinct / all n-grams of words, in [0, 1); 0 for a text without one."""
    words = _WORD.findall(text)
    ngrams = list(zip(*(words[start:] for start in range(NGRAM))))
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def loops(text: str) -> bool:
    """Whether the text ends with at least MIN_TURNS turns of a loop.

    The end of the text then has a period of at most MAX_PERIOD characters. The last turn may be
    incomplete, because the limit on tokens ends most loops.
    """
    text = text.rstrip()
    for period in range(1, MAX_PERIOD + 1):
        size = max(MIN_TURNS * period, MIN_CHARACTERS)
        if size > len(text):
            return False
        # The first comparison is fast and decides most cases.
        if text[-1] == text[-1 - period] and text[-size + period :] == text[-size:-period]:
            return True
    return False
