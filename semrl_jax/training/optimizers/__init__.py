"""Optimisers by name, one module each; `training/optimizer.py` describes the interface."""

from __future__ import annotations

import functools
from typing import Any

import jax
import optax


def with_rounded(
    name: str, dtype: str, transformation: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Keeps the tree `name` of a state in a dtype between steps, and computes in float32.

    Optax rounds the decay to that dtype: in bfloat16, 0.99 is 0.988 and 0.999 is 1.
    """
    if dtype == "float32":
        return transformation

    def cast(state: Any, dtype: str) -> Any:
        to_dtype = functools.partial(jax.tree.map, lambda leaf: leaf.astype(dtype))
        return state._replace(**{name: to_dtype(getattr(state, name))})

    def init(params: optax.Params) -> Any:
        return cast(transformation.init(params), dtype)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = transformation.update(updates, cast(state, "float32"), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)
