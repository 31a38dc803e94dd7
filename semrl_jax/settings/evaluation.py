"""Checks of `config.evaluation`; `sampling.prompt_sources` checks the settings of each file."""

from __future__ import annotations

from semrl_jax.data.rows import check_row_format
from semrl_jax.settings.rollout import check_stop_strings
from semrl_jax.settings.rules import Section, above_zero, at_least_zero, items_are


def check(evaluation: Section) -> None:
    above_zero("evaluation", evaluation, "num_problems")
    at_least_zero("evaluation", evaluation, "every_steps")
    check_row_format(evaluation["row_format"], "evaluation.")
    check_stop_strings("evaluation", evaluation)
    items_are(str, "evaluation", evaluation, "files", "question_fields", "scores", "benchmarks")
