"""Checks of `config.algorithms`; an algorithm checks its own options."""

from __future__ import annotations

from semrl_jax.choices import IMPORTANCE_LEVELS
from semrl_jax.settings.rules import Section, at_least_zero, one_of


def check(algorithms: Section) -> None:
    levels = ("none", *IMPORTANCE_LEVELS)
    one_of("algorithms.importance.level", algorithms["importance"]["level"], levels)
    at_least_zero("algorithms.batch_rules", algorithms["batch_rules"], "overlong_tokens")
