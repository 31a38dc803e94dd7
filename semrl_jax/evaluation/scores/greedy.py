"""Accuracy of one greedy response per problem."""

from __future__ import annotations

from collections.abc import Sequence

import ml_collections
import numpy as np

from semrl_jax.evaluation.protocols import PerProblem, Plan
from semrl_jax.evaluation.samples import NOT_SAMPLED, Sample


def plan(options: ml_collections.ConfigDict) -> Plan:
    """One response per problem, at temperature 0."""
    return Plan()


def per_problem(
    problems: Sequence[Sequence[Sample]], options: ml_collections.ConfigDict
) -> dict[str, PerProblem]:
    """Accuracy, and statistics of the responses.

    Returns:
      `greedy_accuracy` in [0, 1]. Over the sampled responses: `finished_fraction` (ended by an end
      or stop token, not by the limit), `mean_score`, and `mean_length` in tokens, also of the
      correct and the incorrect responses. Over those without an environment, `boxed_fraction`;
      over episodes, `mean_turns`.
    """
    samples = [sample for (sample,) in problems]
    correct = np.array([sample.correct for sample in samples], float)
    sampled = np.array([sample.finish_reason != NOT_SAMPLED for sample in samples], float)
    lengths = np.array([sample.num_tokens for sample in samples], float)
    turns = np.array([sample.num_turns for sample in samples], float)
    finished = [sample.finish_reason in ("eos", "stop") for sample in samples]

    def over(weights, values):
        return PerProblem(np.array(values, float), weights)

    return {
        "greedy_accuracy": PerProblem(correct, with_error=True),
        "boxed_fraction": over(sampled * (turns == 0), [sample.boxed for sample in samples]),
        "finished_fraction": over(sampled, finished),
        "mean_score": over(sampled, [sample.score for sample in samples]),
        "mean_turns": over(sampled * (turns > 0), turns),
        "mean_length": over(sampled, lengths),
        "mean_length_correct": over(sampled * correct, lengths),
        "mean_length_incorrect": over(sampled * (1 - correct), lengths),
    }
