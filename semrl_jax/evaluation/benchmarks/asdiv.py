"""ASDiv (arXiv:2106.15772), 2215 problems with one answer, such as "9 (apples)" or "7:45"."""

import re
from typing import Any

from semrl_jax.evaluation.benchmark import Benchmark, Problem, number_problem, optional_text, text


def read(row: dict[str, Any]) -> Problem:
    answer = re.sub(r"\(.*?\)", "", text(row, "answer")).strip()
    question = f"{text(row, 'body')} {text(row, 'question')}"
    return number_problem(question, answer, optional_text(row, "solution_type"))


BENCHMARK = Benchmark(2215, read)
