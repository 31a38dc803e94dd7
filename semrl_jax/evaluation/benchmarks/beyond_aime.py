"""BeyondAIME, 100 problems whose answers are whole numbers."""

from semrl_jax.evaluation.benchmark import Benchmark, plain

BENCHMARK = Benchmark(100, plain(kind="number"), folder="BeyondAIME")
