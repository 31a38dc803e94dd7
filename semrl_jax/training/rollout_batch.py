"""Pads the rollouts of one step to rectangular arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from semrl_jax import data
from semrl_jax.algorithms.credit import Tokens
from semrl_jax.rounding import next_power_of_two
from semrl_jax.sampling.scoring import ScoredRollout
from semrl_jax.types import Rollout, RolloutBatch

MIN_BUCKET = 16


def bucket(length: int, limit: int) -> int:
    """The smallest power of two >= `length`, at most `limit`: few shapes, few compilations."""
    return min(max(next_power_of_two(length), MIN_BUCKET), limit)


def pad_batch(
    rollouts: Sequence[Rollout],
    *,
    pad_token_id: int,
    max_prompt_tokens: int,
    max_response_tokens: int,
) -> RolloutBatch:
    """Rows [prompt, left-padded | response, right-padded] of NumPy arrays, in the given order."""
    prompts = [rollout.prompt_ids for rollout in rollouts]
    responses = [rollout.response_ids for rollout in rollouts]
    prompt_length = bucket(max(map(len, prompts)), max_prompt_tokens)
    response_length = bucket(max(map(len, responses)), max_response_tokens)
    rows = data.pad_rows(
        prompts,
        responses,
        prompt_length=prompt_length,
        response_length=response_length,
        pad_id=pad_token_id,
    )
    return RolloutBatch(
        token_ids=rows.token_ids,
        positions=rows.positions,
        segment_ids=rows.segment_ids,
        response_mask=data.pad_response_values(
            [rollout.response_mask for rollout in rollouts], response_length, bool
        ),
        rollout_logprobs=data.pad_response_values(
            [rollout.rollout_logprobs for rollout in rollouts], response_length
        ),
    )


def prompts_alone(batch: RolloutBatch, group_size: int) -> RolloutBatch:
    """The prompt of each group as one row, in which every token but the first is a response token.

    A pass over it gives the log-probability of each prompt token after those before it.
    """
    num_columns = batch.token_ids.shape[1] - batch.response_mask.shape[1]
    token_ids, segment_ids, positions = (
        array[::group_size, :num_columns]
        for array in (batch.token_ids, batch.segment_ids, batch.positions)
    )
    follows = positions[:, 1:] > 0  # it is 0 at the first token and on padding
    return RolloutBatch(
        token_ids=token_ids,
        positions=positions,
        segment_ids=segment_ids,
        response_mask=follows,
        rollout_logprobs=np.zeros(follows.shape, np.float32),
    )


def credited_tokens(batch: RolloutBatch, scored: Sequence[ScoredRollout]) -> Tokens:
    """What `assign_credit` reads of a batch."""
    truncated = np.array([item.rollout.finish_reason == "length" for item in scored])
    return Tokens(batch.response_mask, truncated, batch.rollout_logprobs)
