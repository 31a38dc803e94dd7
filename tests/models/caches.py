"""Caches of prompts with room for further tokens."""

import jax.numpy as jnp

from semrl_jax import models


def widened(cache, count):
    """The cache with `count` empty columns more."""

    def on(axis, array, value=0):
        widths = [(0, 0)] * array.ndim
        widths[axis] = 0, count
        return jnp.pad(array, widths, constant_values=value)

    return models.KVCache(
        tuple(on(3, keys) for keys in cache.keys),
        tuple(on(2, values) for values in cache.values),
        on(1, cache.positions, -1),
    )
