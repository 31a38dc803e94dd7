"""Checks of `config.hidden_states`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semrl_jax.settings.rules import at_least_zero, one_of


def check(hidden_states: Mapping[str, Any]) -> None:
    """Raises UserError for the first wrong field."""
    one_of("hidden_states.source", hidden_states["source"], ("rollout", "policy", "none"))
    one_of("hidden_states.dtype", hidden_states["dtype"], ("bfloat16", "float32"))
    at_least_zero("hidden_states", hidden_states, "compare_every")
