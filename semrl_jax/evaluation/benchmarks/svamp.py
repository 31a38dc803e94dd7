"""SVAMP (arXiv:2103.07191), 1000 word problems: a body and a question; answers are numbers."""

from typing import Any

from semrl_jax.evaluation.benchmark import Benchmark, Problem, number_problem, optional_text, text


def read(row: dict[str, Any]) -> Problem:
    body = text(row, "Body")
    body = body if body.endswith(".") else f"{body}."
    question = f"{body} {text(row, 'Question')}"
    return number_problem(question, text(row, "Answer"), optional_text(row, "Type"))


BENCHMARK = Benchmark(1000, read)
