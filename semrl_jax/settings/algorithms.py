"""Checks of `config.algorithms`; an algorithm checks its own options."""

from __future__ import annotations

from semrl_jax.choices import IMPORTANCE_LEVELS
from semrl_jax.errors import UserError
from semrl_jax.settings.rules import Section, one_of


def check(algorithms: Section) -> None:
    importance = algorithms["importance"]
    one_of("algorithms.importance.level", importance["level"], ("none", *IMPORTANCE_LEVELS))
    if importance["cap"] < 1:
        raise UserError(
            f"algorithms.importance.cap={importance['cap']} must be at least 1: below, it would "
            "lower the weights of all tokens, and with them the learning rate."
        )
