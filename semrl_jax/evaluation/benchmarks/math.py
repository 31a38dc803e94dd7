"""MATH (arXiv:2103.03874), the 5000 test problems; the answer is the last box of the solution."""

from typing import Any

from semrl_jax.evaluation.benchmark import Benchmark, Problem, boxed, optional_text, text


def read(row: dict[str, Any]) -> Problem:
    problem_type = optional_text(row, "type", "subject")
    return Problem(text(row, "problem", "question"), boxed(row, "solution"), problem_type)


BENCHMARK = Benchmark(5000, read, note="the fields are those of the first publication")
