"""Checks of `config.evaluation`; `evaluation.entries` checks the settings of each benchmark."""

from __future__ import annotations

import re

from semrl_jax.data.rows import check_row_format
from semrl_jax.settings import metrics
from semrl_jax.settings.rewards import check_function
from semrl_jax.settings.rollout import MIN_TEMPERATURE, check_stop_strings
from semrl_jax.settings.rules import Section, above_zero, at_least_zero, items_are
from semrl_jax.support.errors import UserError


def check(evaluation: Section) -> None:
    above_zero("evaluation", evaluation, "num_problems", "responses_per_call")
    at_least_zero("evaluation", evaluation, "every_steps", "shots")
    check_row_format(evaluation["row_format"], "evaluation.")
    check_stop_strings("evaluation", evaluation)
    items_are(str, "evaluation", evaluation, "files", "question_fields", "scores", "benchmarks")
    items_are(int, "evaluation", evaluation, "k")
    check_sampling(evaluation, most=most_responses(evaluation))
    if evaluation["verifier"]:
        check_function("evaluation.verifier", evaluation["verifier"])
    metrics.check(evaluation["metric_options"], "evaluation.metric_options")
    if evaluation["shots"] and not evaluation["shots_file"]:
        raise UserError(
            f"evaluation.shots={evaluation['shots']} takes examples from evaluation.shots_file, "
            "which is empty; name a .jsonl or .parquet file with question and answer."
        )


def most_responses(evaluation: Section) -> int:
    """The largest n: of all benchmarks, or that an entry of `evaluation.benchmarks` sets."""
    own = [int(n) for text in evaluation["benchmarks"] for n in re.findall(r":n=(\d{1,9})", text)]
    return max(evaluation["n"], *own, 1)


def check_sampling(options: Section, place: str = "evaluation.", most: int = 0) -> None:
    """Checks n, k, temperature, top_p and top_k.

    Args:
      options: with these fields.
      place: the beginning of their names.
      most: the largest k; 0: n.
    """
    n, temperature = options["n"], options["temperature"]
    if n < 1:
        raise UserError(f"{place}n={n} must be at least 1.")
    if temperature != 0 and temperature < MIN_TEMPERATURE:
        raise UserError(
            f"{place}temperature={temperature} must be 0, which is greedy, or at least "
            f"{MIN_TEMPERATURE}."
        )
    if temperature == 0 and n > 1:
        raise UserError(
            f"{place}temperature=0 is greedy, which gives {place}n={n} equal responses; set a "
            f"temperature such as 0.6, or {place}n=1."
        )
    if not 0 < options["top_p"] <= 1:
        raise UserError(f"{place}top_p={options['top_p']} must be in (0, 1].")
    if options["top_k"] < 0:
        raise UserError(f"{place}top_k={options['top_k']} must be at least 0; 0 keeps all tokens.")
    for k in options["k"]:
        if not 1 <= k <= max(n, most):
            raise UserError(
                f"{place}k has {k}, which must be from 1 to {place}n={n}, the responses per "
                f"problem; raise n or leave it out."
            )
