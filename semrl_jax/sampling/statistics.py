"""Scalars of a batch of responses for the log: rewards, lengths, metrics, mismatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float

from semrl_jax.algorithms import zero_variance_group_fraction
from semrl_jax.metrics.names import FINAL_LAYER
from semrl_jax.sampling.scoring import Scored, ScoredRollout
from semrl_jax.types import FINISH_REASONS, Annealing, Rollout


def batch_scalars(scored: Scored, rewards: Float[np.ndarray, "P G"]) -> dict[str, float]:
    """Statistics of the sampled responses and their rewards.

    Args:
      scored: B = P * G responses in (group, sample) order.
      rewards: float32 rewards that the update uses, one row per group.

    Returns:
      `reward/...`, `response/...`, `prompt/...` and `metrics/<name>/{mean,correct,incorrect,...}`.
      Statistics of correct (incorrect) responses are left out if there is none, and those of groups
      if a group has one response. Invalid metrics are excluded; `metrics/<name>/valid_fraction` is
      the share of valid ones.
    """
    correct = np.array([item.verdict.correct for item in scored])
    lengths = np.array([item.rollout.num_policy_tokens for item in scored], float)
    scalars = {
        "reward/mean": rewards.mean(),
        "reward/max": rewards.max(),
        "reward/min": rewards.min(),
        "reward/correct": correct.mean(),
        "reward/num_correct": correct.sum(),
        "reward/num_incorrect": (~correct).sum(),
        "reward/boxed_fraction": np.mean([item.verdict.boxed for item in scored]),
        "reward/verifier_error_fraction": np.mean([bool(item.verdict.error) for item in scored]),
    }
    for name in scored[0].verdict.parts:
        scalars[f"reward/{name}/mean"] = np.mean([item.verdict.parts[name] for item in scored])
    if rewards.shape[1] > 1:
        scalars["reward/group_std"] = rewards.std(axis=1).mean()
        scalars["reward/zero_variance_group_fraction"] = zero_variance_group_fraction(rewards)
    prompts = [len(item.rollout.prompt_ids) for item in scored]
    for kind, of in (("mean", np.mean), ("max", np.max), ("min", np.min)):
        scalars[f"prompt/length/{kind}"] = of(prompts)
    scalars |= _by_correctness("response/length", lengths, correct, np.ones_like(correct))
    reasons = [item.rollout.finish_reason for item in scored]
    for reason in FINISH_REASONS:
        ended = np.array([found == reason for found in reasons])
        scalars[f"response/{reason}_fraction"] = ended.mean()
        for kind, mask in (("correct", correct), ("incorrect", ~correct)):
            if mask.any():
                scalars[f"response/{reason}_fraction/{kind}"] = ended[mask].mean()
    return {name: float(value) for name, value in scalars.items()} | metric_scalars(scored)


def metric_scalars(scored: Scored, prefix: str = "metrics") -> dict[str, float]:
    """`<prefix>/<metric>/...` of measured responses, with the share of valid metrics."""
    correct = np.array([item.verdict.correct for item in scored])
    scalars = {}
    for key, (values, valid) in scored.metrics.items():
        scalars |= _by_correctness(f"{prefix}/{key.label}", values.astype(float), correct, valid)
        scalars[f"{prefix}/{key.label}/valid_fraction"] = valid.mean()
    return {name: float(value) for name, value in scalars.items()}


def staleness(
    scored: Sequence[ScoredRollout], step: int, *, by_token: bool = False
) -> dict[str, float]:
    """`rollout/staleness`, the mean, and `.../max`: steps from the weights of a response to `step`.

    Those of its oldest token count. With `by_token` also `.../tokens`, the mean over all tokens.
    """
    spans = [span for item in scored for span in item.rollout.versions]
    ages = [step - min(span.version.step for span in item.rollout.versions) for item in scored]
    found = {"rollout/staleness": float(np.mean(ages)), "rollout/staleness/max": float(max(ages))}
    if by_token:
        each, lengths = zip(*((step - s.version.step, s.end - s.start) for s in spans))
        found["rollout/staleness/tokens"] = float(np.average(each, weights=lengths))
    return found


def logprob_mismatch(
    rollouts: Sequence[Rollout],
    old_logprobs: Float[np.ndarray, "B T"],
    *,
    temperature: float,
    top_p: float,
    top_k: int,
    annealing: Annealing | None = None,
) -> dict[str, float]:
    """Absolute difference of the log-probabilities of engine and training model, in nats.

    Those of the training model are over the whole vocabulary at `temperature`. With top-p or top-k,
    the engine samples from a part of the vocabulary, and with an annealed temperature at others.
    Then its raw log-probabilities are compared, which are over the whole vocabulary at
    temperature 1. Returns {} if the temperatures differ or
    an engine sends no raw log-probabilities.

    Args:
      rollouts: B responses.
      old_logprobs: of the training model; padding and context may hold anything.
      temperature, top_p, top_k, annealing: of the sampling.
    """
    differs = top_p < 1 or top_k > 0 or annealing is not None
    if differs and temperature != 1:
        return {}
    theirs = [r.rollout_raw_logprobs if differs else r.rollout_logprobs for r in rollouts]
    if any(logprobs is None for logprobs in theirs):
        return {}
    masks = [rollout.response_mask for rollout in rollouts]
    ours = [row[: len(mask)][mask] for row, mask in zip(old_logprobs, masks)]
    theirs = [logprobs[mask] for logprobs, mask in zip(theirs, masks)]
    difference = np.abs(np.concatenate(ours) - np.concatenate(theirs))
    return {
        "rollout/logprob_mismatch/mean": float(difference.mean()),
        "rollout/logprob_mismatch/max": float(difference.max()),
    }


def state_differences(
    scored: Sequence[ScoredRollout], states: Mapping[int, Float[np.ndarray, "_ D"]]
) -> dict[str, float]:
    """Relative difference of the hidden states of engine and training model, per token.

    Args:
      scored: B responses; those with hidden states are compared.
      states: of the training model, by index of the response; those that this process has.

    Returns:
      `count`, `sum` and `max` of |ours - theirs| / |ours| over the compared tokens.
    """
    relative = [np.zeros(0)]
    for index, row in states.items():
        rollout = scored[index].rollout
        if rollout.hidden_states is None:
            continue
        ours = row.astype(np.float32)
        theirs = rollout.policy_states(FINAL_LAYER).astype(np.float32)
        relative.append(np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(ours, axis=1))
    values = np.concatenate(relative)
    total, largest = float(values.sum()), float(values.max(initial=0.0))
    return {"count": float(len(values)), "sum": total, "max": largest}


def state_mismatch(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`state_differences` of all processes as log scalars; {} if nothing was compared."""
    count = sum(part["count"] for part in parts)
    if not count:
        return {}
    return {
        "rollout/hidden_state_mismatch/mean": sum(part["sum"] for part in parts) / count,
        "rollout/hidden_state_mismatch/max": max(part["max"] for part in parts),
    }


def _by_correctness(
    prefix: str,
    values: Float[np.ndarray, " B"],
    correct: Bool[np.ndarray, " B"],
    valid: Bool[np.ndarray, " B"],
) -> dict[str, float]:
    found = {}
    for mean, kind, mask in (
        ("mean", "", valid),
        ("correct", "correct_", correct & valid),
        ("incorrect", "incorrect_", ~correct & valid),
    ):
        if mask.any():
            found[f"{prefix}/{mean}"] = values[mask].mean()
            found[f"{prefix}/{kind}max"] = values[mask].max()
            found[f"{prefix}/{kind}min"] = values[mask].min()
    return found
