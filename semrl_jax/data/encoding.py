"""From the text of a prompt to its token ids, with the tokens that the tokenizer adds before it.

Training, fine-tuning, evaluation, generation and chat encode prompts here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Int

from semrl_jax.data.row_files import RowError
from semrl_jax.data.templates import is_chat
from semrl_jax.data.tokenizer import Tokenizer
from semrl_jax.support.errors import UserError

_PROBE = "1"


def special_prefix(
    tokenizer: Tokenizer, template: str = "plain", add_special_tokens: bool = True
) -> list[int]:
    """The tokens that the tokenizer adds before a text by default, such as BOS; not with "chat".

    An end token that a tokenizer adds after a text is left out, because a response must follow.
    """
    if not add_special_tokens or is_chat(template):
        return []
    own, whole = (
        [*tokenizer([_PROBE], add_special_tokens=added)["input_ids"][0]] for added in (False, True)
    )
    starts = range(len(whole) - len(own) + 1)
    return whole[: next((i for i in starts if whole[i : i + len(own)] == own), 0)]


def encode(tokenizer: Tokenizer, texts: Sequence[str], prefix: Sequence[int]) -> list[list[int]]:
    """Token ids of prompts, [] without a token. A text that begins with the prefix gets it once."""
    if not texts:  # the tokenizer does not accept an empty batch
        return []
    found = tokenizer([*texts], add_special_tokens=False)["input_ids"]
    return [[*_missing(prefix, ids), *ids] for ids in found]


def encode_given(
    tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int
) -> list[Int[np.ndarray, " _"]]:
    """Int32 ids of given responses, as a policy would sample them: the end token comes last.

    RowError: one has more than `max_tokens`.
    """
    end = tokenizer.eos_token_id
    found = [[*ids, *[end] * (ids[-1:] != [end])] for ids in encode(tokenizer, texts, ())]
    if longest := max((len(ids) for ids in found if len(ids) > max_tokens), default=0):
        raise RowError(
            f"a given response has {longest} tokens, more than rollout.max_response_tokens="
            f"{max_tokens}; raise it, or shorten the response."
        )
    return [np.array(ids, np.int32) for ids in found]


def encode_spans(
    tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]], prefix: Sequence[int] = ()
) -> tuple[Int[np.ndarray, " S"], Bool[np.ndarray, " S"]]:
    """Token ids of the text, and whether the text of each token begins in a span (first, end)."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    begins = np.array([begin for begin, _ in found["offset_mapping"]], np.int64)
    mask = np.zeros(len(begins), bool)
    for begin, end in spans:
        mask |= (begins >= begin) & (begins < end)
    added = _missing(prefix, found["input_ids"])
    token_ids = np.array([*added, *found["input_ids"]], np.int32)
    return token_ids, np.concatenate([np.zeros(len(added), bool), mask])


def _missing(prefix: Sequence[int], ids: Sequence[int]) -> Sequence[int]:
    """The tokens to put before the ids of a text."""
    return prefix if ids and [*ids[: len(prefix)]] != [*prefix] else ()


def template_line(
    of: str,
    template: str,
    tokenizer: Tokenizer,
    add_special_tokens: bool,
    fields: tuple[str, str] = ("data.template", "data.add_special_tokens"),
) -> str:
    """Says which template prompts have and which tokens come before them."""
    shown = f"{of}: template {template!r:.100}"
    if is_chat(template):
        return f"{shown}, the tokenizer's chat template, which writes its special tokens itself"
    if getattr(tokenizer, "chat_template", None):
        shown += f" (not the tokenizer's chat template, which {fields[0]}=chat chooses)"
    prefix = special_prefix(tokenizer, template)
    if not prefix:
        return f"{shown}, no special token before it (tokenizer's default)"
    tokens = " ".join(map(str, tokenizer.convert_ids_to_tokens(prefix)))
    if not add_special_tokens:
        return f"{shown}, no {tokens} before it ({fields[1]}=False)"
    return f"{shown}, {tokens} before it (tokenizer's default)"


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, place: str) -> None:
    """Checks that the model has an embedding for every token that the tokenizer may write.

    Special tokens are allowed beyond the vocabulary: the text models of Gemma 3 have the tokenizer
    of the models with images. `check_ids` finds a prompt with one.
    """
    beyond = {token: i for token, i in tokenizer.get_vocab().items() if i >= vocab_size}
    if not beyond:
        return
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    needed = {tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token}
    wrong = {token: i for token, i in beyond.items() if token not in special - needed}
    if wrong:
        token = min(wrong, key=lambda name: wrong[name])
        raise UserError(
            f"{place}: the tokenizer has {len(wrong)} tokens beyond the model's vocab_size="
            f"{vocab_size}, such as {token!r:.50} with id {wrong[token]}; they do not belong "
            "together: take the tokenizer of this model, or give the model more embeddings."
        )


def check_ids(
    tokenizer: Tokenizer, vocab_size: int, named: Iterable[tuple[str, Int[np.ndarray, " _"]]]
) -> None:
    """UserError for the first prompt or conversation with a token beyond the vocabulary."""
    for name, ids in named:
        if len(ids) and ids.max() >= vocab_size:
            token = int(ids.max())
            text = tokenizer.convert_ids_to_tokens(token)
            raise UserError(
                f"{name} has the token {text!r:.50} with id {token}, beyond the model's vocab_size="
                f"{vocab_size}; remove its text, or take a tokenizer of the model."
            )
