"""Pads the rollouts of one step to rectangular arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int, UInt

from semrl_jax import data
from semrl_jax.algorithms.algorithm import Spans
from semrl_jax.algorithms.credit import Tokens
from semrl_jax.sampling.scoring import ScoredRollout
from semrl_jax.support.rounding import next_power_of_two
from semrl_jax.types import Rollout, RolloutBatch, experts_dtype

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
    may_be_given: bool = False,
    routed_experts: tuple[int, ...] = (),
) -> RolloutBatch:
    """Rows [prompt, left-padded | response, right-padded] of NumPy arrays, in this order.

    With `may_be_given`, it has `given`, and with `routed_experts`, as `DecoderConfig` has them, the
    experts that tokens went to. Else these are None.
    """
    prompts = [rollout.prompt_ids for rollout in rollouts]
    responses = [rollout.response_ids for rollout in rollouts]
    response_length = bucket(max(map(len, responses)), max_response_tokens)
    rows = data.pad_rows(
        prompts,
        responses,
        prompt_length=bucket(max(map(len, prompts)), max_prompt_tokens),
        response_length=response_length,
        pad_id=pad_token_id,
    )
    for row, rollout in enumerate(rollouts):
        if rollout.conversations is not None:
            place = row, slice(-response_length, len(responses[row]) - response_length or None)
            rows.segment_ids[place] = rollout.conversations + 1
            rows.positions[place] = _positions(rollout.conversations, len(prompts[row]))
    masks = [rollout.response_mask for rollout in rollouts]
    logprobs = [rollout.rollout_logprobs for rollout in rollouts]
    return RolloutBatch(
        **vars(rows),
        response_mask=data.pad_response_values(masks, response_length, bool),
        rollout_logprobs=data.pad_response_values(logprobs, response_length),
        given=np.array([rollout.is_given for rollout in rollouts]) if may_be_given else None,
        routed_experts=_experts(rollouts, rows.segment_ids > 0, *routed_experts)
        if routed_experts
        else None,
    )


def prompts_of(batch: RolloutBatch) -> list[Int[np.ndarray, " _"]]:
    """The token ids of the prompt of each row, without padding."""
    num_prompt = batch.token_ids.shape[1] - batch.response_mask.shape[1]
    ids, own = (array[:, :num_prompt] for array in (batch.token_ids, batch.segment_ids))
    return [row[mask > 0] for row, mask in zip(ids, own, strict=True)]


def _experts(
    rollouts: Sequence[Rollout],
    tokens: Bool[np.ndarray, "B S"],
    num_layers: int,
    per_token: int,
    num_experts: int,
) -> UInt[np.ndarray, "B S M C"]:
    """The experts of all tokens, in the columns where the tokens are."""
    dtype = experts_dtype(num_experts)
    found = np.full((*tokens.shape, num_layers, per_token), np.iinfo(dtype).max, dtype)
    for row, first, rollout in zip(found, tokens.argmax(axis=1), rollouts):
        if (own := rollout.routed_experts) is not None:
            row[first : first + len(own)] = own
    return found


def _positions(conversations: Int[np.ndarray, " T"], num_prompt: int) -> Int[np.ndarray, " T"]:
    """The position of each token in its conversation; the prompt is the beginning of number 0."""
    found = np.zeros(len(conversations), np.int32)
    for number in np.unique(conversations):
        own = conversations == number
        found[own] = np.arange(own.sum()) + (num_prompt if number == 0 else 0)
    return found


def credited_tokens(
    batch: RolloutBatch,
    scored: Sequence[ScoredRollout],
    of_spans: Sequence[Float[np.ndarray, " _"] | None] | None = None,
    prompts: Int[np.ndarray, " P"] | None = None,
) -> Tokens:
    """What `assign_credit` reads of a batch.

    Args:
      of_spans: rewards of the turns or steps of each response, if they are needed; None for a
        response that has none.
      prompts: numbers of the prompts of the groups, if they are needed.
    """
    mask = batch.response_mask
    truncated = np.array([item.rollout.finish_reason == "length" for item in scored])
    tokens = Tokens(mask, truncated, batch.rollout_logprobs, given=batch.given, prompts=prompts)
    if of_spans is None:
        return tokens
    spans = Spans(np.zeros(mask.shape, np.float32), np.zeros(mask.shape, bool))
    for row, (item, own, rewards) in enumerate(zip(scored, mask, of_spans, strict=True)):
        if rewards is None:
            continue
        ends = item.rollout.step_ends
        if ends is None:
            ends = np.flatnonzero(np.diff(own, append=False) & own)
        ends = ends[: len(rewards)]
        spans.rewards[row, ends] = rewards[: len(ends)]
        spans.ends[row, ends] = True
    return tokens._replace(spans=spans)
