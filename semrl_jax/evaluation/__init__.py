"""Benchmarks on a frozen policy."""

from semrl_jax.evaluation.greedy import greedy_scalars

__all__ = ["greedy_scalars"]
