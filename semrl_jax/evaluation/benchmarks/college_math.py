"""College mathematics of MathScale (arXiv:2403.02884), 2818 problems of textbooks, 7 topics."""

from typing import Any

from semrl_jax.evaluation.benchmark import (
    Benchmark,
    Problem,
    optional_text,
    text,
    without_dollars,
)


def read(row: dict[str, Any]) -> Problem:
    topic = optional_text(row, "data_topic").removeprefix("college_math.")
    return Problem(text(row, "question"), without_dollars(text(row, "answer")), topic)


BENCHMARK = Benchmark(2818, read)
