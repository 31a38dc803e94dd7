"""AQuA-RAT (arXiv:1705.04146), the 254 test problems; one of five options, "A)..." to "E)..."."""

import re
from typing import Any

from semrl_jax.evaluation.benchmark import (
    Benchmark,
    Problem,
    choice_problem,
    letters_of,
    text,
    texts,
)


def read(row: dict[str, Any]) -> Problem:
    choices = [re.sub(r"^[A-E]\)\s*", "", option) for option in texts(row, "options", 5)]
    return choice_problem(text(row, "question"), letters_of(row, "correct", "ABCDE"), choices)


BENCHMARK = Benchmark(254, read)
