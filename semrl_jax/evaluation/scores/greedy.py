"""Accuracy of one greedy response per problem."""

from __future__ import annotations

from collections.abc import Sequence

import ml_collections
import numpy as np

from semrl_jax.evaluation.interface import Plan
from semrl_jax.sampling.scoring import ScoredRollout


def plan(options: ml_collections.ConfigDict) -> Plan:
    """One response per problem, at temperature 0."""
    return Plan()


def scalars(
    benchmark: str, responses: Sequence[Sequence[ScoredRollout]], num_problems: int
) -> dict[str, float]:
    """Accuracy, and statistics of the responses.

    Args:
      benchmark: its name.
      responses: one response per sampled problem.
      num_problems: of the benchmark, at least 1; problems without a response count as wrong.

    Returns:
      `eval/<benchmark>/...`: `greedy_accuracy` in [0, 1], its standard error, and `num_problems`.
      If there are responses, also `boxed_fraction`, `finished_fraction` (ended by an end or stop
      token, not by the limit), `mean_score` and `mean_length` in tokens; if there are correct
      (incorrect) responses, their `mean_length_correct` (`_incorrect`).
    """
    scored = [item for items in responses for item in items]
    rollouts, verdicts = [item.rollout for item in scored], [item.verdict for item in scored]
    accuracy = sum(verdict.correct for verdict in verdicts) / num_problems
    found = {
        "greedy_accuracy": accuracy,
        "greedy_accuracy_stderr": np.sqrt(accuracy * (1 - accuracy) / num_problems),
        "num_problems": num_problems,
    }
    if rollouts:
        finished = [rollout.finish_reason in ("eos", "stop") for rollout in rollouts]
        correct = np.array([verdict.correct for verdict in verdicts])
        lengths = np.array([rollout.num_policy_tokens for rollout in rollouts])
        for kind, mask in (("correct", correct), ("incorrect", ~correct)):
            if mask.any():
                found[f"mean_length_{kind}"] = lengths[mask].mean()
        found |= {
            "boxed_fraction": np.mean([verdict.boxed for verdict in verdicts]),
            "finished_fraction": np.mean(finished),
            "mean_score": np.mean([verdict.score for verdict in verdicts]),
            "mean_length": lengths.mean(),
        }
    return {f"eval/{benchmark}/{name}": float(value) for name, value in found.items()}
