"""OlymMATH (arXiv:2503.21380), English, the hard half: 100 problems of olympiads."""

from semrl_jax.evaluation.benchmark import Benchmark, plain

BENCHMARK = Benchmark(100, plain(problem_type=("subject",)), folder="OlymMATH-EN-HARD")
