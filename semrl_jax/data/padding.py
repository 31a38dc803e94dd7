"""Pads token ids of unequal length to rectangular arrays, those of demonstrations too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int, Shaped

from semrl_jax.data.arithmetic import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS
from semrl_jax.data.encoding import encode, special_prefix
from semrl_jax.data.tokenizer import Tokenizer


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


@dataclasses.dataclass(frozen=True, eq=False)
class Demonstrations(PaddedTokens):
    """Padded rows, and the tokens to predict."""

    # True on response tokens, the end token included. The logits that predict column t are in
    # column t - 1
    loss_mask: Bool[np.ndarray, "B S"]


def demonstration_rows(
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    *,
    prompt_length: int = MAX_PROMPT_TOKENS,
    response_length: int = MAX_RESPONSE_TOKENS,
) -> Demonstrations:
    """Tokenises (prompt, response) pairs and ends each response with the end token.

    The lengths are in tokens, the end token included. ValueError for no pair, or a long text.
    """
    if not pairs:
        raise ValueError("there are no demonstrations.")
    prompts, responses = zip(*pairs)
    prompt_ids = encode(tokenizer, prompts, special_prefix(tokenizer))
    rows = pad_rows(
        [np.array(ids, np.int32) for ids in prompt_ids],
        [
            np.array([*ids, tokenizer.eos_token_id], np.int32)
            for ids in encode(tokenizer, responses, ())
        ],
        prompt_length=prompt_length,
        response_length=response_length,
        pad_id=tokenizer.pad_token_id,
    )
    is_response = np.arange(prompt_length + response_length) >= prompt_length  # [S]
    return Demonstrations(**vars(rows), loss_mask=(rows.segment_ids == 1) & is_response)
