"""Demonstrations as arrays for supervised training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from semrl_jax.data.arithmetic import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS
from semrl_jax.data.encoding import encode, special_prefix
from semrl_jax.data.padding import PaddedTokens, pad_rows
from semrl_jax.data.tokenizer import Tokenizer


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
