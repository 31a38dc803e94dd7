"""Reflection in the responses: words with which a model reconsiders what it wrote."""

from __future__ import annotations

import re
from collections.abc import Sequence

import ml_collections

from semrl_jax.evaluation.protocols import PerProblem
from semrl_jax.evaluation.repeated import over_responses, plan
from semrl_jax.evaluation.samples import Sample

__all__ = ["per_problem", "plan"]

# The words that the reference implementation counts (sh/collect_results.py); it counts them within
# other words too, such as "wait" in "waiter".
WORDS = ("recheck", "rethink", "try again", "wait", "alternatively", "retry", "however")
_WORDS = re.compile(rf"\b(?:{'|'.join(WORDS)})\b")


def per_problem(
    problems: Sequence[Sequence[Sample]], options: ml_collections.ConfigDict
) -> dict[str, PerProblem]:
    """`responses/reflection_fraction` (responses with one of WORDS), `.../reflection_words`."""
    return {
        "responses/reflection_fraction": over_responses(
            problems, lambda sample: float(count(sample.response) > 0)
        ),
        "responses/reflection_words": over_responses(
            problems, lambda sample: count(sample.response)
        ),
    }


def count(text: str) -> int:
    """How often WORDS occur in the text, as whole words in any case."""
    text = text.lower()
    # Most responses have none, and the search for plain texts is much faster.
    return len(_WORDS.findall(text)) if any(word in text for word in WORDS) else 0
