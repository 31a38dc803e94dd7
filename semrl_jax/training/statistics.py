"""Scalars of one batch of rollouts, on the host; the log keys of rewards, lengths and metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from semrl_jax.training.scoring import ScoredRollout
from semrl_jax.types import RolloutBatch


def batch_scalars(
    scored: Sequence[ScoredRollout], rewards: Float[np.ndarray, "P G"]
) -> dict[str, float]:
    """What was sampled and how it scored.

    Args:
      scored: B = P * G responses in (group, sample) order.
      rewards: float32 rewards as trained on, one row a group.

    Returns:
      `reward/...`, `response/...`, `prompt/...` and `metrics/<name>/{mean,correct,incorrect,...}`.
      Means by correctness are left out where no response is of that kind; invalid metrics stay out
      of every mean and are counted in `metrics/<name>/valid_fraction`.
    """
    correct = np.array([item.verdict.correct for item in scored])
    lengths = np.array([len(item.rollout.response_ids) for item in scored], float)
    spread = rewards.std(axis=1)
    scalars = {
        "reward/mean": rewards.mean(),
        "reward/max": rewards.max(),
        "reward/min": rewards.min(),
        "reward/correct": correct.mean(),
        "reward/num_correct": correct.sum(),
        "reward/num_incorrect": (~correct).sum(),
        "reward/boxed_fraction": np.mean([item.verdict.boxed for item in scored]),
        "reward/group_std": spread.mean(),
        "reward/zero_variance_group_fraction": np.mean(spread == 0),
        "reward/verifier_error_fraction": np.mean([bool(item.verdict.error) for item in scored]),
    }
    prompts = [len(item.rollout.prompt_ids) for item in scored]
    for kind, of in (("mean", np.mean), ("max", np.max), ("min", np.min)):
        scalars[f"prompt/length/{kind}"] = of(prompts)
    scalars |= _by_correctness("response/length", lengths, correct, np.ones_like(correct))
    reasons = [item.rollout.finish_reason for item in scored]
    for reason in ("eos", "stop", "length"):
        ended = np.array([found == reason for found in reasons])
        scalars[f"response/{reason}_fraction"] = ended.mean()
        for kind, mask in (("correct", correct), ("incorrect", ~correct)):
            if mask.any():
                scalars[f"response/{reason}_fraction/{kind}"] = ended[mask].mean()
    return {name: float(value) for name, value in scalars.items()} | metric_scalars(scored)


def metric_scalars(scored: Sequence[ScoredRollout], prefix: str = "metrics") -> dict[str, float]:
    """`<prefix>/<metric>/...` of measured responses, and the share of valid ones."""
    correct = np.array([item.verdict.correct for item in scored])
    scalars = {}
    for name in scored[0].rollout.metrics:
        if name.endswith("_valid"):
            continue
        values = np.array([item.rollout.metrics[name] for item in scored])
        valid = np.array([item.rollout.metrics[f"{name}_valid"] for item in scored], bool)
        scalars |= _by_correctness(f"{prefix}/{name}", values, correct, valid)
        scalars[f"{prefix}/{name}/valid_fraction"] = valid.mean()
    return {name: float(value) for name, value in scalars.items()}


def metric_arrays(scored: Sequence[ScoredRollout]) -> dict[str, np.ndarray]:
    """The metrics of all responses as [B] arrays: float32 values, bool validity."""
    return {
        name: np.array(
            [item.rollout.metrics[name] for item in scored],
            bool if name.endswith("_valid") else np.float32,
        )
        for name in scored[0].rollout.metrics
    }


def mismatch_scalars(
    scored: Sequence[ScoredRollout],
    batch: RolloutBatch,
    old_logprobs: Float[np.ndarray, "B T"],
    states: Sequence[Float[np.ndarray, "_ D"]] | None,
) -> dict[str, float]:
    """How far the rollout engine is from the training model on the same tokens.

    Args:
      scored: B responses; those with hidden states are compared with `states`.
      batch: the same, padded.
      old_logprobs: of the training model, nats.
      states: of the training model, [T, D] of each response; None: not at hand.

    Returns:
      `rollout/logprob_mismatch/{mean,max}`, nats; and where both sources of hidden states are at
      hand `rollout/hidden_state_mismatch/{mean,max}`, the length of a row's difference over the
      length of the row.
    """
    difference = np.abs(old_logprobs - batch.rollout_logprobs)[batch.response_mask]
    scalars = {
        "rollout/logprob_mismatch/mean": float(difference.mean()),
        "rollout/logprob_mismatch/max": float(difference.max()),
    }
    # Of several processes each has those of the responses it sampled.
    held = [i for i, item in enumerate(scored) if item.rollout.hidden_states is not None]
    if states is not None and held:
        ours = np.concatenate([states[i] for i in held]).astype(np.float32)
        theirs = np.concatenate([scored[i].rollout.hidden_states[:, 0] for i in held])
        length = np.linalg.norm(ours, axis=1)
        relative = np.linalg.norm(ours - theirs.astype(np.float32), axis=1) / length
        scalars["rollout/hidden_state_mismatch/mean"] = float(relative.mean())
        scalars["rollout/hidden_state_mismatch/max"] = float(relative.max())
    return scalars


def _by_correctness(
    prefix: str,
    values: Float[np.ndarray, " B"],
    correct: Bool[np.ndarray, " B"],
    valid: Bool[np.ndarray, " B"],
) -> dict[str, float]:
    if not valid.any():
        return {}
    kept = values[valid]
    found = {
        f"{prefix}/mean": kept.mean(),
        f"{prefix}/max": kept.max(),
        f"{prefix}/min": kept.min(),
    }
    for kind, mask in (("correct", correct & valid), ("incorrect", ~correct & valid)):
        if mask.any():
            found[f"{prefix}/{kind}"] = values[mask].mean()
            found[f"{prefix}/{kind}_max"] = values[mask].max()
            found[f"{prefix}/{kind}_min"] = values[mask].min()
    return found
