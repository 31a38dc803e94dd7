"""Greedy accuracy of a frozen policy on problems with reference answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from semrl_jax.rewards import Verdict
from semrl_jax.types import Rollout


def greedy_scalars(
    benchmark: str, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict], num_problems: int
) -> dict[str, float]:
    """Accuracy and shape of one greedy response per problem.

    Args:
      benchmark: its name.
      rollouts, verdicts: of the problems that were sampled, in one order.
      num_problems: of the benchmark, at least 1; those without a response count as wrong.

    Returns:
      `eval/<benchmark>/...`: `greedy_accuracy` in [0, 1] and its standard error, `boxed_fraction`,
      `finished_fraction` (ended by end or stop token, not by the limit), `mean_score`,
      `mean_length` in tokens (also `_correct`, `_incorrect`, where there are such), `num_problems`.
      All but accuracy, its error and `num_problems` are of the responses, and absent without any.
    """
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
