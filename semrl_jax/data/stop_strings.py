"""Stop strings: the token that ends a response, and the text before the stop string.

The text of a response is what its token ids decode to without special tokens. Decoding a response
again for every token would take quadratic time. Instead each token has its own bytes, and stop
strings are searched in the joined bytes of the tokens. These contain the bytes of the text, and
more only where a decoder strips a space or replaces bytes that are not UTF-8. A match is
therefore confirmed by decoding the response once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from semrl_jax.support.errors import UserError

# Decoders that give each token a text that does not depend on the tokens around it; only a space
# before the first token may be missing.
_DECODERS = {"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}


def stop_text(tokenizer: Any, ids: Int[np.ndarray, " T"] | Sequence[int]) -> str:
    """The text in which stop strings are searched: without special tokens, spaces as decoded."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def before_stop(text: str, stop_strings: Sequence[str]) -> str:
    """The text before the stop string that begins first; all of it if there is none."""
    return text[: min((at for at in map(text.find, stop_strings) if at >= 0), default=len(text))]


class TokenBytes(dict[int, bytes]):
    """The UTF-8 bytes that each token adds to a text, b"" for special ones; made when looked up.

    UserError if the bytes of a token can depend on the tokens around it.
    """

    def __init__(self, tokenizer: Any):
        super().__init__()
        self.tokenizer = tokenizer
        self._added = set(tokenizer.added_tokens_decoder)
        self._kinds, self._byte_of = _decoder_kinds(tokenizer), {}
        if "ByteLevel" in self._kinds:
            self._byte_of = byte_level_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = found = self._bytes_of(token_id)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id not in self._added:
            name = self.tokenizer.convert_ids_to_tokens(token_id)
            if name is None:
                return b""
            if self._byte_of and all(character in self._byte_of for character in name):
                return bytes(self._byte_of[character] for character in name)
            if "ByteFallback" in self._kinds and re.fullmatch("<0x[0-9A-F]{2}>", name):
                return bytes([int(name[3:5], 16)])
        # The second of two equal tokens: some decoders strip a space before the first token.
        once, twice = (stop_text(self.tokenizer, [token_id] * count) for count in (1, 2))
        return twice.removeprefix(once).encode()


class StopMatcher:
    """Finds the token that ends one response; the total time is linear in the response's length.

    Args:
      tokens: of the tokenizer; may be shared by all responses.
      stop_strings: at least one; none empty, none with U+FFFD.
    """

    def __init__(self, tokens: TokenBytes, stop_strings: Sequence[str]):
        self._tokens = tokens
        self._stop_strings = stop_strings
        self._patterns = [text.encode() for text in stop_strings]
        self._overlap = max(map(len, self._patterns)) - 1
        self._ids: list[int] = []
        self._tail = b""  # the last `_overlap` bytes

    def feed(self, token_ids: Sequence[int]) -> int | None:
        """How many of the next tokens stay, if a stop string ends with the last; None: go on."""
        pieces = [self._tokens[token_id] for token_id in token_ids]
        data, num_before = self._tail + b"".join(pieces), len(self._ids)
        self._ids += token_ids
        if any(pattern in data for pattern in self._patterns):
            end = len(self._tail)
            for count, piece in enumerate(pieces, 1):
                start, end = end, end + len(piece)
                if self._ends_within(data, start, end) and self._is_in_text(num_before + count):
                    return count
        self._tail = data[max(len(data) - self._overlap, 0) :]
        return None

    def _ends_within(self, data: bytes, start: int, end: int) -> bool:
        """Whether a pattern ends after byte `start` and at most at byte `end`."""
        return any(
            data.find(pattern, max(start - len(pattern) + 1, 0), end) >= 0
            for pattern in self._patterns
        )

    def _is_in_text(self, num_tokens: int) -> bool:
        text = stop_text(self._tokens.tokenizer, self._ids[:num_tokens])
        return any(stop_string in text for stop_string in self._stop_strings)


def _decoder_kinds(tokenizer: Any) -> set[str]:
    """The types of the decoder's parts; raises UserError for one that is not known here."""
    kinds, known = {type(tokenizer).__name__}, False
    if getattr(tokenizer, "is_fast", False):
        decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
        parts = decoder.get("decoders", [decoder] if decoder else [])
        kinds = {part["type"] for part in parts}
        # Bytes are replaced at the end, so no other part may see the text of a token.
        allowed = {"ByteLevel", "Fuse"} if "ByteLevel" in kinds else _DECODERS
        known = kinds <= allowed and not any(part.get("stop") for part in parts)
    if not known:
        raise UserError(
            "stop strings and rewarded steps cannot be found with this tokenizer, whose decoder is "
            f"{'+'.join(sorted(kinds))}; use rollout.stop_token_ids, and return no steps."
        )
    return kinds


def byte_level_alphabet() -> dict[str, int]:
    """The byte of each character of byte-level BPE: itself, or one from 256 on. Source: GPT-2."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
