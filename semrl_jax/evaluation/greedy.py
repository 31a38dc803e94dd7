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
      `finished_fraction` (ended by end or stop token, not by the limit), `mean_length` in tokens,
      `num_problems`.
    """
    prefix = f"eval/{benchmark}/"
    accuracy = np.mean([verdict.correct for verdict in verdicts])
    finished = [rollout.finish_reason in ("eos", "stop") for rollout in rollouts]
    return {
        prefix + "greedy_accuracy": float(accuracy),
        prefix + "greedy_accuracy_stderr": float(
            np.sqrt(accuracy * (1 - accuracy) / len(verdicts))
        ),
        prefix + "boxed_fraction": float(np.mean([verdict.boxed for verdict in verdicts])),
        prefix + "finished_fraction": float(np.mean(finished)),
        prefix + "mean_length": float(np.mean([len(r.response_ids) for r in rollouts])),
        prefix + "num_problems": float(len(verdicts)),
    }
