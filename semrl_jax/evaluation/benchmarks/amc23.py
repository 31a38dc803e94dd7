"""AMC 12 2023, 40 problems without their options; answers are whole numbers (27.0)."""

from semrl_jax.evaluation.benchmark import Benchmark, plain

BENCHMARK = Benchmark(40, plain(kind="number"))
