"""Benchmarks by name: one module for each, whose `BENCHMARK` says how its rows are read."""
