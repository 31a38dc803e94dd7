"""Pads token ids of unequal length to rectangular arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Shaped


@dataclasses.dataclass(frozen=True, eq=False)
class PaddedTokens:
    """Rows [prompt, padded on the left | response, padded on the right]; all arrays are int32.

    The tokens of a row are contiguous, and the responses of all rows begin in the same column.
    """

    token_ids: Int[np.ndarray, "B S"]  # the padding id where padded
    segment_ids: Int[np.ndarray, "B S"]  # 1 on tokens, 0 on padding
    positions: Int[np.ndarray, "B S"]  # from 0 at the first token of the row; 0 on padding


def pad_rows(
    prompt_ids: Sequence[Int[np.ndarray, " _"]],
    response_ids: Sequence[Int[np.ndarray, " _"]],
    *,
    prompt_length: int,
    response_length: int,
    pad_id: int,
) -> PaddedTokens:
    """Lays out training rows; S = prompt_length + response_length. ValueError: one is too long."""
    if len(prompt_ids) != len(response_ids):
        raise ValueError(
            f"{len(prompt_ids)} prompts and {len(response_ids)} responses do not pair."
        )
    token_ids = np.full((len(prompt_ids), prompt_length + response_length), pad_id, np.int32)
    segment_ids = np.zeros_like(token_ids)
    for i, (prompt, response) in enumerate(zip(prompt_ids, response_ids)):
        _check_fits(len(prompt), prompt_length)
        _check_fits(len(response), response_length)
        columns = slice(prompt_length - len(prompt), prompt_length + len(response))
        token_ids[i, columns] = np.concatenate([prompt, response])
        segment_ids[i, columns] = 1
    counts = np.cumsum(segment_ids, axis=1, dtype=np.int32)
    positions = np.where(segment_ids == 1, counts - 1, np.int32(0))
    return PaddedTokens(token_ids, segment_ids, positions)


def pad_response_values(
    values: Sequence[Shaped[np.ndarray, " _"]], length: int, dtype: type = np.float32
) -> Shaped[np.ndarray, "B T"]:
    """Pads values of response tokens with 0 on the right; ValueError if there are too many."""
    padded = np.zeros((len(values), length), dtype)
    for row, row_values in zip(padded, values, strict=True):
        _check_fits(len(row_values), length)
        row[: len(row_values)] = row_values
    return padded


def _check_fits(size: int, length: int):
    if size > length:
        raise ValueError(f"{size} tokens do not fit into a length of {length}.")
