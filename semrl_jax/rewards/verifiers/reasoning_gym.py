"""The scorer of the data set that a problem comes from: data.task='reasoning_gym'.

The score is in [0, 1], and 1 is correct. The answer is what stands between `<answer>` and
`</answer>`. Without these tags, it is what `find_answer` finds, and the whole response is scored
too, for answers of several lines: the better score counts. Scorers that only compare texts give a
part of the score to a text that contains the answer: for a whole response, they count if they give
1. `rewards.mode` has no influence.

Some scorers of the package would execute an answer, by `eval` or by sympy's parser, which calls it.
Here the first read literals only, and the second get arithmetic and elementary functions only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from semrl_jax.data.procedural import remade
from semrl_jax.rewards.extraction import find_answer, has_complete_box
from semrl_jax.rewards.verdict import Verdict, VerifierSettings
from semrl_jax.support.end_markers import response_text

_TAGGED = re.compile(r"<answer>\s*((?:(?!</?answer>).)*?)\s*</answer>", re.DOTALL)
# For sympy's parser: numbers, variables of one letter and functions. Neither texts nor attributes,
# with which an answer can run anything, nor Integral or expand, which leave the work to the scorer.
_FUNCTIONS = "sin|cos|tan|cot|sec|csc|a(?:sin|cos|tan)|(?:sin|cos|tan)h|exp|log|ln|sqrt|abs|Abs|pi"
_EXPRESSION = re.compile(
    rf"(?:[\s\d+\-*/^%().,!]|(?<![^\W\d])(?:{_FUNCTIONS}|[A-Za-z])(?!\w))*", re.ASCII
)


def verify(
    response: str, reference: str, settings: VerifierSettings, row: Mapping[str, Any] | None = None
) -> Verdict:
    """Scores a response by the data set of its problem, with the reference as its answer."""
    dataset, entry = remade(row)
    if reference and isinstance(entry["answer"], str):
        # polynomial_multiplication makes other problems in a process with other hashes.
        entry = {**entry, "answer": reference}
    text = response_text(response).strip()
    tagged = _TAGGED.findall(text)
    answer = tagged[-1] if tagged else find_answer(text)
    candidates = [answer] if tagged else [answer, text]
    scores = {c: float(dataset.score_answer(_harmless(dataset, c), entry)) for c in candidates if c}
    if scores.get(text, 1.0) < 1.0 and text != answer and only_compares(dataset):
        del scores[text]
    best = max(scores, key=scores.__getitem__, default=None)
    score = min(max(scores.get(best, 0.0), 0.0), 1.0)
    extracted = answer if best is None or best == text else best
    return Verdict(score, score >= 1.0, has_complete_box(response), extracted)


def _harmless(dataset: Any, answer: str) -> str | None:
    """The answer, or None, which is wrong, if the scorer of the data set would execute it."""
    scorer = type(dataset).score_answer
    if "eval" in scorer.__code__.co_names:
        scorer.__globals__["eval"] = ast.literal_eval
    is_parsed = "parse_expr" in scorer.__code__.co_names
    return answer if not is_parsed or _EXPRESSION.fullmatch(answer) else None


def only_compares(dataset: Any) -> bool:
    """Whether the data set has no scorer of its own."""
    from reasoning_gym.dataset import ProceduralDataset

    return type(dataset).score_answer is ProceduralDataset.score_answer


def prepare() -> None:
    """Imports the package, before the first deadline starts."""
    import reasoning_gym  # noqa: F401
