"""Checks of `config.algorithms`; an algorithm checks its own options."""

from __future__ import annotations

from semrl_jax.choices import IMPORTANCE_LEVELS
from semrl_jax.settings.rules import Section, one_of


def check(algorithms: Section) -> None:
    levels = ("none", *IMPORTANCE_LEVELS)
    one_of("algorithms.importance.level", algorithms["importance"]["level"], levels)
