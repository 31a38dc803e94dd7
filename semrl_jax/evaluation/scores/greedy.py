"""Accuracy of one greedy response per problem."""

from __future__ import annotations

from collections.abc import Sequence

import ml_collections
import numpy as np

from semrl_jax.evaluation.seam import Plan
from semrl_jax.sampling.scoring import ScoredRollout


def plan(options: ml_collections.ConfigDict) -> Plan:
    """One response per problem, at temperature 0."""
    return Plan()


def scalars(
    benchmark: str, responses: Sequence[Sequence[ScoredRollout]], num_problems: int
) -> dict[str, float]:
    """Accuracy and shape of the responses.

    Args:
      benchmark: its name.
      responses: one per problem, of the problems that were sampled.
      num_problems: of the benchmark, at least 1; those without a response count as wrong.

    Returns:
      `eval/<benchmark>/...`: `greedy_accuracy` in [0, 1] and its standard error, `boxed_fraction`,
      `finished_fraction` (ended by end or stop token, not by the limit), `mean_score`,
      `mean_length` in tokens (also `_correct`, `_incorrect`, where there are such), `num_problems`.
      All but accuracy, its error and `num_problems` are of the responses, and absent without any.
    """
    scored = [item for items in responses for item in items]
    rollouts, verdicts = [item.rollout for item in scored], [item.verdict for item in scored]
    prefix = f"eval/{benchmark}/"
    accuracy = sum(verdict.correct for verdict in verdicts) / num_problems
    of_all = {
        prefix + "greedy_accuracy": accuracy,
        prefix + "greedy_accuracy_stderr": float(np.sqrt(accuracy * (1 - accuracy) / num_problems)),
        prefix + "num_problems": float(num_problems),
    }
    if not rollouts:
        return of_all
    finished = [rollout.finish_reason in ("eos", "stop") for rollout in rollouts]
    correct = np.array([verdict.correct for verdict in verdicts])
    lengths = np.array([rollout.num_policy_tokens for rollout in rollouts])
    by_correctness = {
        f"{prefix}mean_length_{kind}": float(lengths[mask].mean())
        for kind, mask in (("correct", correct), ("incorrect", ~correct))
        if mask.any()
    }
    return {
        **of_all,
        **by_correctness,
        prefix + "boxed_fraction": float(np.mean([verdict.boxed for verdict in verdicts])),
        prefix + "finished_fraction": float(np.mean(finished)),
        prefix + "mean_score": float(np.mean([verdict.score for verdict in verdicts])),
        prefix + "mean_length": float(lengths.mean()),
    }
