"""MATH-500 (arXiv:2305.20050), 500 test problems of MATH; the answer has its own field."""

from semrl_jax.evaluation.benchmark import Benchmark, plain

BENCHMARK = Benchmark(500, plain(problem_type=("subject", "type")))
