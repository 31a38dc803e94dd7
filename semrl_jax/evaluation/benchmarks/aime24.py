"""AIME 2024, I and II: 30 problems; answers are whole numbers from 0 to 999."""

from semrl_jax.evaluation.benchmark import Benchmark, plain

BENCHMARK = Benchmark(30, plain(kind="number"))
