"""Checks of `config.algorithms`; an algorithm checks its own options."""

from __future__ import annotations

from semrl_jax.choices import IMPORTANCE_LEVELS
from semrl_jax.errors import UserError
from semrl_jax.settings.rules import Section, at_least_zero, one_of


def check(algorithms: Section) -> None:
    levels = ("none", *IMPORTANCE_LEVELS)
    one_of("algorithms.importance.level", algorithms["importance"]["level"], levels)
    name, rules = "algorithms.batch_rules", algorithms["batch_rules"]
    at_least_zero(name, rules, "overlong_tokens", "ace_alpha", "arm_alpha")
    if not 0 < rules["arm_low_fraction"] <= 1:
        raise UserError(
            f"{name}.arm_low_fraction={rules['arm_low_fraction']} must be in (0, 1]: it is a share "
            "of the tokens."
        )
