"""The rewards of a batch: the scores of its verdicts, with the rules that change them."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import ml_collections
import numpy as np
from jaxtyping import Float, Int

from semrl_jax.rewards.grading.text import answer_class
from semrl_jax.sampling.scoring import ScoredRollout

SHUFFLE = 0x5AFF  # last in its seed: (s,) and (s, 0) are one stream to NumPy


def group_rewards(
    scored: Sequence[ScoredRollout], config: ml_collections.ConfigDict, step: int
) -> Float[np.ndarray, "P G"]:
    """`unshuffled_rewards`, permuted over the batch under `rewards.shuffle`."""
    rewards = unshuffled_rewards(scored, config)
    return rewards.reshape(-1)[_order(rewards.size, config, step)].reshape(rewards.shape)


def span_rewards(
    scored: Sequence[ScoredRollout], config: ml_collections.ConfigDict, step: int
) -> list[Float[np.ndarray, " _"] | None]:
    """Rewards of the turns or steps of each response, permuted like `group_rewards`.

    None for a response whose steps nobody judged, or whose environment failed: its reward is that
    of its last turn.
    """
    rewards = []
    for rollout in (item.rollout for item in scored):
        found = rollout.step_rewards if rollout.turn_rewards is None else rollout.turn_rewards
        rewards.append(None if rollout.environment_error else found)
    return [rewards[index] for index in _order(len(rewards), config, step)]


def _order(count: int, config: ml_collections.ConfigDict, step: int) -> Int[np.ndarray, " B"]:
    """Whose reward each response gets."""
    if not config.rewards.shuffle:
        return np.arange(count)
    return np.random.default_rng((config.seed, step, SHUFFLE)).permutation(count)


def unshuffled_rewards(
    scored: Sequence[ScoredRollout], config: ml_collections.ConfigDict
) -> Float[np.ndarray, "P G"]:
    """Float32 scores, one row per group, with the penalty of `batch_rules.overlong_tokens`."""
    size = config.rollout.group_size
    scores = np.array([item.verdict.score for item in scored], np.float32)
    if config.rewards.majority:
        scores = majority_scores([item.verdict.extracted for item in scored], size)
    if buffer := config.algorithms.batch_rules.overlong_tokens:
        lengths = np.array([len(item.rollout.response_ids) for item in scored])
        limit = config.rollout.max_response_tokens
        scores += overlong_penalty(lengths, limit=limit, buffer=buffer)
    return scores.reshape(-1, size)


def majority_scores(answers: Sequence[str | None], size: int) -> Float[np.ndarray, " B"]:
    """1.0 for a response with the answer that most of its group of `size` have, else 0.0.

    Answers are equal as in maj@k. The first of two with as many votes wins. Without an answer, a
    response has no vote and gets 0.0.

    Source: arXiv:2504.16084 (TTRL), Sec. 2.2: the majority in the place of a reference answer.
    """
    classes = [answer_class(answer) for answer in answers]
    scores = []
    for start in range(0, len(classes), size):
        group = classes[start : start + size]
        votes = collections.Counter(filter(None, group)).most_common(1)
        scores += [float(bool(votes) and answer == votes[0][0]) for answer in group]
    return np.array(scores, np.float32)


def overlong_penalty(
    lengths: Int[np.ndarray, " B"], *, limit: int, buffer: int
) -> Float[np.ndarray, " B"]:
    """Computes what is added to the rewards: clip((limit - buffer - length) / buffer, -1, 0).

    Args:
      limit: tokens at which a response is cut off.
      buffer: tokens below the limit in which the penalty grows from 0 to 1; above 0.

    Returns float32 from -1.0 to 0.0, in the unit of the rewards.

    Source: arXiv:2503.14476 (DAPO), Eq. 13; there the limit is 20480 and the buffer 4096.
    """
    return np.clip((limit - buffer - lengths) / buffer, -1.0, 0.0).astype(np.float32)
