"""Gaokao 2024, examination I, Chinese: 8 single choices, 3 multiple choices ("ACD"), 3 blanks."""

from semrl_jax.evaluation.benchmark import Benchmark
from semrl_jax.evaluation.chinese import choice_or_blank

BENCHMARK = Benchmark(14, choice_or_blank)
