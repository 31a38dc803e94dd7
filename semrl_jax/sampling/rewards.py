"""The rewards of a batch: the scores of its verdicts, with the rules that change them."""

from __future__ import annotations

from collections.abc import Sequence

import ml_collections
import numpy as np
from jaxtyping import Float

from semrl_jax.rewards.overlong import overlong_penalty
from semrl_jax.sampling.scoring import ScoredRollout

SHUFFLE = 0x5AFF  # last in its seed: (s,) and (s, 0) are one stream to NumPy


def group_rewards(
    scored: Sequence[ScoredRollout], config: ml_collections.ConfigDict, step: int
) -> Float[np.ndarray, "P G"]:
    """`unshuffled_rewards`, permuted over the batch under `rewards.shuffle`."""
    rewards = unshuffled_rewards(scored, config)
    if config.rewards.shuffle:
        random = np.random.default_rng((config.seed, step, SHUFFLE))
        rewards = random.permutation(rewards.reshape(-1)).reshape(rewards.shape)
    return rewards


def unshuffled_rewards(
    scored: Sequence[ScoredRollout], config: ml_collections.ConfigDict
) -> Float[np.ndarray, "P G"]:
    """Float32 scores, one row per group, with the penalty of `batch_rules.overlong_tokens`."""
    scores = np.array([item.verdict.score for item in scored], np.float32)
    if buffer := config.algorithms.batch_rules.overlong_tokens:
        lengths = np.array([len(item.rollout.response_ids) for item in scored])
        limit = config.rollout.max_response_tokens
        scores += overlong_penalty(lengths, limit=limit, buffer=buffer)
    return scores.reshape(-1, config.rollout.group_size)
