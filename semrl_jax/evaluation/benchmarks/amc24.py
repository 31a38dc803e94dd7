"""AMC 12 2024, 45 problems without their options; answers are LaTeX, and once a name ("D")."""

from semrl_jax.evaluation.benchmark import Benchmark, plain

BENCHMARK = Benchmark(45, plain(problem_type=("exam",)))
