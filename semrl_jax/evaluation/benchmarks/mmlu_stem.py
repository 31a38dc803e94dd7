"""MMLU (arXiv:2009.03300), the 3018 test problems of 18 STEM subjects; the answer is an index."""

from typing import Any

from semrl_jax.data.files import RowError
from semrl_jax.evaluation.benchmark import (
    Benchmark,
    Problem,
    choice_problem,
    optional_text,
    text,
    texts,
)


def read(row: dict[str, Any]) -> Problem:
    index = row.get("answer")
    if type(index) is not int or not 0 <= index < 4:
        raise RowError(f"field 'answer' must be an index from 0 to 3, not {index!r:.80}.")
    choices = texts(row, "choices", 4)
    subject = optional_text(row, "type", "subject")
    return choice_problem(text(row, "question"), "ABCD"[index], choices, subject)


BENCHMARK = Benchmark(3018, read)
