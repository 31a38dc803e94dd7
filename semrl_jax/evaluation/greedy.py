"""Greedy accuracy of a frozen policy on problems with reference answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from semrl_jax.rewards import Verdict
from semrl_jax.types import Rollout


def greedy_scalars(
    benchmark: str, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict]
) -> dict[str, float]:
    """Accuracy and shape of one greedy response a problem.

    Returns:
      `eval/<benchmark>/...`: `greedy_accuracy` in [0, 1] and its standard error, `boxed_fraction`,
      `finished_fraction` (ended by end or stop token, not by the limit), `mean_score`,
      `mean_length` in tokens (also `_correct`, `_incorrect`, where there are such), `num_problems`.
    """
    prefix = f"eval/{benchmark}/"
    accuracy = np.mean([verdict.correct for verdict in verdicts])
    finished = [rollout.finish_reason in ("eos", "stop") for rollout in rollouts]
    correct = np.array([verdict.correct for verdict in verdicts])
    lengths = np.array([len(rollout.response_ids) for rollout in rollouts])
    by_correctness = {
        f"{prefix}mean_length_{kind}": float(lengths[mask].mean())
        for kind, mask in (("correct", correct), ("incorrect", ~correct))
        if mask.any()
    }
    return by_correctness | {
        prefix + "greedy_accuracy": float(accuracy),
        prefix + "greedy_accuracy_stderr": float(
            np.sqrt(accuracy * (1 - accuracy) / len(verdicts))
        ),
        prefix + "boxed_fraction": float(np.mean([verdict.boxed for verdict in verdicts])),
        prefix + "finished_fraction": float(np.mean(finished)),
        prefix + "mean_score": float(np.mean([verdict.score for verdict in verdicts])),
        prefix + "mean_length": float(lengths.mean()),
        prefix + "num_problems": float(len(verdicts)),
    }
