"""Token ids of unequal length as rectangles.

A row of a training batch is [prompt, padded on the left | response, padded on the right]. Its valid
tokens are contiguous, and the response of every row begins in the same column. `segment_ids` is 1
on valid tokens and 0 on padding. `positions` counts from 0 at the first valid token and is 0 on
padding. All are int32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int


@dataclasses.dataclass(frozen=True, eq=False)
class PaddedTokens:
    """Padded token ids with their segment ids and positions."""

    token_ids: Int[np.ndarray, "B S"]
    segment_ids: Int[np.ndarray, "B S"]
    positions: Int[np.ndarray, "B S"]


def pad_prompts(
    prompt_ids: Sequence[Int[np.ndarray, " _"]], length: int, pad_id: int
) -> PaddedTokens:
    """Pads prompts on the left.

    Raises:
      ValueError: if a prompt is longer than `length`.
    """
    return _pad(prompt_ids, length, pad_id, left=True)


def pad_responses(
    response_ids: Sequence[Int[np.ndarray, " _"]], length: int, pad_id: int
) -> PaddedTokens:
    """Pads responses on the right.

    Raises:
      ValueError: if a response is longer than `length`.
    """
    return _pad(response_ids, length, pad_id, left=False)


def pad_rows(
    prompt_ids: Sequence[Int[np.ndarray, " _"]],
    response_ids: Sequence[Int[np.ndarray, " _"]],
    *,
    prompt_length: int,
    response_length: int,
    pad_id: int,
) -> PaddedTokens:
    """Lays out training rows; S = prompt_length + response_length.

    The response of every row starts in column `prompt_length`, so `segment_ids[:, prompt_length:]`
    is the response mask. Positions continue from the prompt into the response.

    Raises:
      ValueError: if the numbers of prompts and responses differ, or one is too long.
    """
    if len(prompt_ids) != len(response_ids):
        raise ValueError(
            f"{len(prompt_ids)} prompts and {len(response_ids)} responses do not pair."
        )
    prompts = pad_prompts(prompt_ids, prompt_length, pad_id)
    responses = pad_responses(response_ids, response_length, pad_id)
    segment_ids = np.concatenate([prompts.segment_ids, responses.segment_ids], axis=1)
    return PaddedTokens(
        np.concatenate([prompts.token_ids, responses.token_ids], axis=1),
        segment_ids,
        _positions(segment_ids),
    )


def pad_response_values(
    values: Sequence[Float[np.ndarray, " _"]], length: int
) -> Float[np.ndarray, "B T"]:
    """Pads float32 values of response tokens, such as log-probabilities, with 0 on the right.

    Raises:
      ValueError: if there are more than `length` values for a response.
    """
    padded = np.zeros((len(values), length), np.float32)
    for row, row_values in zip(padded, values, strict=True):
        _check_fits(len(row_values), length)
        row[: len(row_values)] = row_values
    return padded


def _pad(
    sequences: Sequence[Int[np.ndarray, " _"]], length: int, pad_id: int, *, left: bool
) -> PaddedTokens:
    token_ids = np.full((len(sequences), length), pad_id, np.int32)
    segment_ids = np.zeros((len(sequences), length), np.int32)
    for i, ids in enumerate(sequences):
        _check_fits(len(ids), length)
        columns = slice(length - len(ids), length) if left else slice(0, len(ids))
        token_ids[i, columns] = ids
        segment_ids[i, columns] = 1
    return PaddedTokens(token_ids, segment_ids, _positions(segment_ids))


def _positions(segment_ids: Int[np.ndarray, "B S"]) -> Int[np.ndarray, "B S"]:
    counts = np.cumsum(segment_ids, axis=1, dtype=np.int32)
    return np.where(segment_ids == 1, counts - 1, np.int32(0))


def _check_fits(size: int, length: int):
    if size > length:
        raise ValueError(f"{size} tokens do not fit into a length of {length}.")
