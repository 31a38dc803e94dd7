"""Checks of `config.evaluation`; `evaluation.entries` checks the settings of each benchmark."""

from __future__ import annotations

from semrl_jax.data.rows import check_row_format
from semrl_jax.errors import UserError
from semrl_jax.settings.rules import Section, above_zero, at_least_zero, items_are


def check(evaluation: Section) -> None:
    above_zero("evaluation", evaluation, "num_problems")
    at_least_zero("evaluation", evaluation, "every_steps", "shots")
    check_row_format(evaluation["row_format"], "evaluation.")
    items_are(str, "evaluation", evaluation, "files", "question_fields", "scores", "benchmarks")
    if evaluation["shots"] and not evaluation["shots_file"]:
        raise UserError(
            f"evaluation.shots={evaluation['shots']} takes examples from evaluation.shots_file, "
            "which is empty; name a .jsonl or .parquet file with question and answer."
        )
