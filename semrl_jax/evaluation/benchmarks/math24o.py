"""Chinese high school olympiad 2024 (preliminary), 21 problems; answers are numbers ("10.0")."""

from semrl_jax.evaluation.benchmark import Benchmark, plain

BENCHMARK = Benchmark(21, plain(kind="number"))
