"""Questions about a local corpus: the policy searches in it, reads passages, and answers.

A message without a call ends the episode: reward 1 if it equals an answer by the rules of
`rewards.grading`, else 0. `environment.name=search:corpus=docs.jsonl:questions=questions.jsonl`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from semrl_jax.data import read_rows
from semrl_jax.environments.interface import Message, Turn
from semrl_jax.environments.tools.bm25 import search_tool
from semrl_jax.rewards.grading import grade, prepare
from semrl_jax.support.errors import UserError

SYSTEM = "Search for the answer with the tool. Once you know it, write the answer alone."


class Environment:
    """Questions whose answers are in a corpus.

    Args:
      corpus: see `search_tool`.
      questions: a .jsonl or .parquet file. Each row has "question", a text, and "answer": a text, a
        number, or a list of these, which are all right.
      num_results, max_chars: of an answer of the tool.
    """

    def __init__(self, corpus: str, questions: str, num_results: int = 3, max_chars: int = 2000):
        self.tools = [search_tool(corpus, num_results=num_results, max_chars=max_chars)]
        self._tasks = list(_tasks(questions))
        prepare()

    def tasks(self, seed: int, count: int) -> list[dict[str, Any]]:
        return random.Random(seed).sample(self._tasks, min(count, len(self._tasks)))

    def reset(self, task: Mapping[str, Any], seed: int) -> Sequence[Message]:
        self._answer, self._others = task["answer"], task["others"]
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": task["question"]},
        ]

    def step(self, message: str) -> Turn:
        answer = f"Answer: {message.rpartition('</think>')[2].strip()}"
        graded = grade(answer, self._answer, {"references": self._others})
        return Turn(reward=float(graded.correct), done=True)


def _tasks(file: str) -> Iterator[dict[str, Any]]:
    for where, row in read_rows(file, ("question", "answer")):
        if isinstance(row, UserError):
            raise UserError(f"questions: {where}: {row}")
        question, answer = row.get("question"), row.get("answer")
        answers = answer if isinstance(answer, list) else [answer]
        right = [str(each) for each in answers if type(each) in (str, int, float) and each != ""]
        if not isinstance(question, str) or not question or not right or len(right) < len(answers):
            raise UserError(
                f'questions: {where} must have a text as "question", and a text, a number or a '
                'list of these as "answer".'
            )
        yield {"question": question, "answer": right[0], "others": right[1:]}
