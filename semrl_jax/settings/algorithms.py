"""Checks of `config.algorithms`; an algorithm checks its own options."""

from __future__ import annotations

from semrl_jax.choices import IMPORTANCE_LEVELS, KEEP_GROUPS_BY
from semrl_jax.settings.rules import Section, at_least_zero, at_most, one_of

MAX_ROUNDS = 1000  # of dynamic sampling; a step needs an end


def check(algorithms: Section) -> None:
    levels = ("none", *IMPORTANCE_LEVELS)
    one_of("algorithms.importance.level", algorithms["importance"]["level"], levels)
    rules = algorithms["batch_rules"]
    at_least_zero("algorithms.batch_rules", rules, "overlong_tokens", "max_sampling_rounds")
    at_most("algorithms.batch_rules.max_sampling_rounds", rules["max_sampling_rounds"], MAX_ROUNDS)
    one_of("algorithms.batch_rules.keep_groups_by", rules["keep_groups_by"], KEEP_GROUPS_BY)
