"""Data sets of the package reasoning-gym: a question, and another try after a wrong answer.

An answer is scored as by the verifier `reasoning_gym`. It is wrong if its score is below 1. The
reward is the score of the last answer, and is not lowered by earlier ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from semrl_jax.data import procedural
from semrl_jax.environments.interface import Turn
from semrl_jax.rewards import VerifierSettings
from semrl_jax.rewards.verifiers.reasoning_gym import verify
from semrl_jax.support.errors import UserError

RETRY = "That is wrong. Try again."


class Environment:
    """Problems of one data set or of several.

    Args:
      sets: an entry of `data.reasoning_gym`, or a list of entries, which take turns by weight.
      attempts: answers per problem, at most.
      suffix: a text after each question.
      options: of all data sets that do not set them.
    """

    def __init__(
        self, sets: str | Sequence[str], attempts: int = 1, suffix: str = "", **options: Any
    ):
        if type(attempts) is not int or attempts < 1:
            raise UserError(f"attempts={attempts!r} must be a whole number above 0.")
        try:
            found = procedural.sources([sets] if isinstance(sets, str) else sets)
            self._sources = [s._replace(options={**options, **s.options}) for s in found]
            for source in self._sources:
                procedural.examples(source, 1)
        except UserError as error:
            raise UserError(str(error).replace(procedural.FIELD, "sets")) from None
        self._attempts, self._suffix = attempts, str(suffix)

    def tasks(self, seed: int, count: int) -> list[dict[str, Any]]:
        found = procedural.training_problems(self._sources, seed, count, 0)
        return [
            {"question": p.question + self._suffix, "answer": p.answer, **json.loads(p.columns)}
            for p in found
        ]

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        self._task, self._left = task, self._attempts
        return task["question"]

    def step(self, message: str) -> Turn:
        score = verify(message, self._task["answer"], VerifierSettings(), self._task).score
        self._left -= 1
        if score < 1.0 and self._left:
            return Turn(RETRY)
        return Turn(reward=score, done=True)
