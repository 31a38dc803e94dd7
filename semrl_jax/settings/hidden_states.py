"""Checks of `config.hidden_states`."""

from __future__ import annotations

from semrl_jax.settings.rules import Section, at_least_zero, one_of


def check(hidden_states: Section) -> None:
    one_of("hidden_states.source", hidden_states["source"], ("rollout", "policy", "none"))
    one_of("hidden_states.dtype", hidden_states["dtype"], ("bfloat16", "float32"))
    at_least_zero("hidden_states", hidden_states, "compare_every")
