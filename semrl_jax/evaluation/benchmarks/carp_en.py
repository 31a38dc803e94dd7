"""CARP (arXiv:2306.02408), English, 976 problems of algebra; answers are LaTeX with many spaces."""

from semrl_jax.evaluation.benchmark import Benchmark, plain

BENCHMARK = Benchmark(976, plain(("content",)))
