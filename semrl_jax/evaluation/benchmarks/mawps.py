"""MAWPS (NAACL 2016), 2065 word problems of four kinds; answers are numbers."""

from semrl_jax.evaluation.benchmark import Benchmark, plain

BENCHMARK = Benchmark(2065, plain(("input",), "target", ("type",), "number"))
