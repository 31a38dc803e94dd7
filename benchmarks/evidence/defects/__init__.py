"""Defects of the reference implementation's shaping, each alone, as modules of `metrics.probes`.

A probe sees the metrics but not the shaping, so each of these replaces a function of the shaping
that `semrl_jax.algorithms.credit` calls; a run of its own process needs no way back.
`shaping.reproduce_release` has all three at once.
"""
