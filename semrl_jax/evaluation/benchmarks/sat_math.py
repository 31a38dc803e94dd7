"""SAT of May 2023, 32 problems with the options in one text, "A) ... B) ... C) ... D) ..."."""

from typing import Any

from semrl_jax.data.files import RowError
from semrl_jax.evaluation.benchmark import (
    Benchmark,
    Problem,
    choice_problem,
    letters_of,
    options_in,
    text,
)


def read(row: dict[str, Any]) -> Problem:
    choices = options_in(text(row, "options"), "ABCD", r"(?<!\S)L[.)]\s")
    if not choices:
        raise RowError(f"field 'options' must be 'A) ... B) ...', not {row['options']!r:.80}.")
    return choice_problem(text(row, "question"), letters_of(row, "Answer", "ABCD"), choices)


BENCHMARK = Benchmark(32, read)
