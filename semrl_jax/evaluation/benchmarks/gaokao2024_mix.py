"""Gaokao 2024, several examinations, Chinese: 91 problems; 55 have options in the question."""

from semrl_jax.evaluation.benchmark import Benchmark
from semrl_jax.evaluation.chinese import choice_or_text

BENCHMARK = Benchmark(91, choice_or_text)
