"""Minerva's courses (arXiv:2206.14858), 272 problems; the answer is the box of the solution."""

from typing import Any

from semrl_jax.evaluation.benchmark import Benchmark, Problem, boxed, optional_text, text


def read(row: dict[str, Any]) -> Problem:
    question = text(row, "problem", "question")
    return Problem(question, boxed(row, "solution"), optional_text(row, "type"))


BENCHMARK = Benchmark(272, read)
