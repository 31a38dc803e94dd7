"""Scalars of a batch of responses for the log: rewards, lengths, metrics."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from semrl_jax.algorithms import zero_variance_group_fraction
from semrl_jax.sampling.scoring import Scored, mean_of_sampled
from semrl_jax.types import FINISH_REASONS, TURN_METRICS


def batch_scalars(scored: Scored, rewards: Float[np.ndarray, "P G"]) -> dict[str, float]:
    """Statistics of the sampled responses, in (group, sample) order, and of the update's rewards.

    Given responses count in those of whole groups alone, and have `given/...` of their own.
    `reward/...`, `response/...`, `prompt/...` and `metrics/<name>/{mean,correct,incorrect,...}`.
    Those of correct or incorrect responses are left out if there is none, and those of groups if a
    group has one response. Invalid metrics are excluded; `metrics/<name>/valid_fraction` is the
    share of valid ones.
    """
    scalars = {}
    if rewards.shape[1] > 1:
        scalars["reward/group_std"] = rewards.std(axis=1).mean()
        scalars["reward/zero_variance_group_fraction"] = zero_variance_group_fraction(rewards)
    given = np.array([item.rollout.is_given for item in scored])
    correct = np.array([item.verdict.correct for item in scored])
    means = rewards.mean(), correct.mean()
    if given.any():
        sampled = ~given.reshape(rewards.shape)
        means = [mean_of_sampled(x.reshape(sampled.shape), sampled) for x in (rewards, correct)]
        scalars["given/fraction"] = given.mean()
        scalars["given/correct"] = correct[given].mean()
        scored, rewards = scored.take(np.flatnonzero(~given)), rewards.reshape(-1)[~given]
        correct = correct[~given]
    lengths = np.array([item.rollout.num_policy_tokens for item in scored], float)
    scalars |= {
        "reward/mean": means[0],
        "reward/max": rewards.max(),
        "reward/min": rewards.min(),
        "reward/correct": means[1],
        "reward/num_correct": correct.sum(),
        "reward/num_incorrect": (~correct).sum(),
        "reward/boxed_fraction": np.mean([item.verdict.boxed for item in scored]),
        "reward/verifier_error_fraction": np.mean([bool(item.verdict.error) for item in scored]),
    }
    for name in scored[0].verdict.parts:
        scalars[f"reward/{name}/mean"] = np.mean([item.verdict.parts[name] for item in scored])
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
    scalars |= _episode_scalars(scored) | _step_scalars(scored)
    scalars |= _branch_scalars(scored, correct)
    if any(item.rollout.hint is not None for item in scored):
        hinted = np.array([bool(item.rollout.hint) for item in scored])
        scalars["rollout/hints/fraction"] = hinted.mean()
        if hinted.any():
            scalars["rollout/hints/correct"] = correct[hinted].mean()
    return {name: float(value) for name, value in scalars.items()} | metric_scalars(scored)


def _episode_scalars(scored: Scored) -> dict[str, float]:
    """Scalars of the turns of responses with an environment; {} if there is none."""
    episodes = [item.rollout for item in scored if item.rollout.turn_rewards is not None]
    if not episodes:
        return {}
    turns = [len(rollout.turn_rewards) for rollout in episodes]
    measured = {}
    for name, key in TURN_METRICS.items():
        columns = [getattr(rollout, name) for rollout in episodes]
        values = np.concatenate([np.zeros(0), *(of for of in columns if of is not None)])
        if np.isfinite(values).any():
            measured[f"metrics/{key.label}/turn/mean"] = np.nanmean(values)
    return measured | {
        "episode/turns/mean": np.mean(turns),
        "episode/turns/max": np.max(turns),
        "episode/turns/min": np.min(turns),
        "episode/context_tokens/mean": np.mean([(~r.response_mask).sum() for r in episodes]),
        "episode/failed_fraction": np.mean([bool(r.environment_error) for r in episodes]),
        "time/environment_s": sum(rollout.environment_s for rollout in episodes),
    }


def _step_scalars(scored: Scored) -> dict[str, float]:
    """Scalars of the steps that reward functions judged; {} if they judged none."""
    rewards = [r for item in scored if (r := item.rollout.step_rewards) is not None]
    if not rewards:
        return {}
    of_steps = np.concatenate(rewards)
    found = {"response/steps/mean": len(of_steps) / len(scored)}
    return found | ({"response/step_reward/mean": of_steps.mean()} if len(of_steps) else {})


def _branch_scalars(scored: Scored, correct: Bool[np.ndarray, " B"]) -> dict[str, float]:
    """Scalars of the responses that begin with a prefix of another one; {} without branching."""
    if all(item.rollout.parent is None for item in scored):
        return {}
    prefixes = np.array([item.rollout.num_prefix for item in scored])
    found = {"rollout/branches/fraction": (is_branch := prefixes > 0).mean()}
    if not is_branch.any():
        return found
    return found | {
        "rollout/branches/prefix_tokens/mean": prefixes[is_branch].mean(),
        "rollout/branches/correct": correct[is_branch].mean(),
        "rollout/branches/parents_correct": correct[_parents(scored, is_branch)].mean(),
    }


def _parents(scored: Scored, is_branch: Bool[np.ndarray, " B"]) -> list[int]:
    """The rows of the responses that the branches come from, once per branch."""
    keys = [(item.rollout.group_id, item.rollout.sample_index) for item in scored]
    row_of = {key: row for row, key in enumerate(keys)}
    return [row_of[keys[row][0], scored[row].rollout.parent] for row in np.flatnonzero(is_branch)]


def metric_scalars(scored: Scored, prefix: str = "metrics") -> dict[str, float]:
    """`<prefix>/<metric>/...` of measured responses, with the share of valid metrics."""
    correct = np.array([item.verdict.correct for item in scored])
    scalars = {}
    for key, (values, valid) in scored.metrics.items():
        scalars |= _by_correctness(f"{prefix}/{key.label}", values.astype(float), correct, valid)
        scalars[f"{prefix}/{key.label}/valid_fraction"] = valid.mean()
    return {name: float(value) for name, value in scalars.items()}


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
