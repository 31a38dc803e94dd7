"""Chinese middle school examinations 2024, 101 problems; 41 have options in the question."""

from semrl_jax.evaluation.benchmark import Benchmark
from semrl_jax.evaluation.chinese import choice_or_text

BENCHMARK = Benchmark(101, choice_or_text)
