"""CMATH (arXiv:2306.16636), 600 Chinese word problems of grades 1 to 6; answers are numbers."""

from semrl_jax.evaluation.benchmark import Benchmark, plain

BENCHMARK = Benchmark(600, plain(problem_type=("grade",), kind="number"))
