"""Which tokens of a response the parts of its text end in."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from semrl_jax.data.stop_strings import TokenBytes


def tokens_of_ends(
    tokens: TokenBytes, ids: Int[np.ndarray, " T"] | Sequence[int], text: str, ends: Sequence[int]
) -> Int[np.ndarray, " N"]:
    """The index of the token that the character before each end belongs to, int32.

    Args:
      ids: at least one token.
      text: of the response, which may leave out a space at its beginning, and end earlier.
      ends: numbers of characters of the text, each at least 1.

    A character of several tokens belongs to the last of them.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(tokens[int(token_id)]) for token_id in ids]
    pieces[-1] += decoder.decode(b"", final=True)
    left_out = max("".join(pieces).find(text), 0)
    characters = np.cumsum([len(piece) for piece in pieces]) - left_out
    return np.minimum(np.searchsorted(characters, ends), len(pieces) - 1).astype(np.int32)
