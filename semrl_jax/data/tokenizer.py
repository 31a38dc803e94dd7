"""Tokenizers: made for the quickstart, trained on a user's text, or loaded; and their hash."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from semrl_jax.data.stop_strings import before_stop, stop_text
from semrl_jax.support.end_markers import END_MARKERS, response_text
from semrl_jax.support.errors import UserError, prefixed
from semrl_jax.support.safe_files import check_regular, read_json_object

PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"
CHARACTERS = "0123456789+-*=,;:()?\n QA\\boxed{}"

# A transformers.PreTrainedTokenizerBase. Importing transformers takes seconds, so it is done late.
Tokenizer = Any


def character_tokenizer() -> Tokenizer:
    """Makes the tokenizer of 34 symbols: 32 characters, `<pad>` (0) and `<eos>` (1).

    It is byte-level BPE without merges, because transformers loads the tokenizer of every Qwen2
    model as one. Other characters are dropped.
    """
    import tokenizers
    import transformers

    byte_names = {" ": "Ġ", "\n": "Ċ"}  # as byte-level BPE spells them
    symbols = [PAD_TOKEN, EOS_TOKEN, *(byte_names.get(c, c) for c in CHARACTERS)]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=None,  # explicitly: without it, Qwen2's is added as a 35th symbol
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer with Qwen2's padding token, turn tokens and chat template.

    `vocab_size` is at least 260, else UserError; fewer tokens if the texts have fewer.
    """
    num_fixed = 256 + 3  # every byte, so that any text can be written; padding, turn start and end
    if vocab_size <= num_fixed:
        raise UserError(f"vocab_size={vocab_size} must be above {num_fixed}: bytes have their own.")
    import transformers

    start, end = "<|im_start|>", "<|im_end|>"
    tokenizer = transformers.Qwen2Tokenizer().train_new_from_iterator(
        texts, vocab_size, new_special_tokens=[start, end], show_progress=False
    )
    tokenizer.eos_token = end
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_MAX_TOKENIZER_BYTES = 256 * 2**20
# transformers reads these as well. Each is a small JSON object, or absent.
_SETTINGS_FILES = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json",
    "generation_config.json",
)  # fmt: skip


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads a tokenizer from a local Hugging Face directory; runs no code from there.

    A tokenizer without a padding token, such as Llama's, gets the one that the directory's
    generation_config.json or config.json declares, if it is a special token. Otherwise it gets the
    end token. UserError if it has none, or cannot be read.
    """
    path = pathlib.Path(path)
    if not path.is_dir():
        raise UserError(
            f"tokenizer directory {str(path)!r} does not exist; give one with a tokenizer.json."
        )
    files = [path / name for name in _TOKENIZER_FILES if (path / name).is_file()]
    if not files:
        # transformers would make an empty tokenizer of the model's family.
        raise UserError(
            f"{str(path)!r} holds no tokenizer: one of {', '.join(_TOKENIZER_FILES)} is needed."
        )
    for file in files:
        if file.stat().st_size > _MAX_TOKENIZER_BYTES:
            raise UserError(f"{file} is larger than {_MAX_TOKENIZER_BYTES // 2**20} MiB.")
    for file in path.iterdir():  # transformers opens several of them
        if file.exists() and not file.is_dir():
            check_regular(file)
    for name in _SETTINGS_FILES:
        _read_settings(path / name)
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        if not isinstance(tokenizer.model_max_length, int | float):
            raise TypeError(f"model_max_length={tokenizer.model_max_length!r} is no number")
    # The cause of any failure is in the files. The Rust part raises Exception itself.
    except Exception as e:
        reason = " ".join(str(e).split())[:200]
        raise UserError(
            f"no tokenizer can be loaded from {str(path)!r}: {type(e).__name__}: {reason}"
        ) from e
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer in {str(path)!r} has no eos token; name one as 'eos_token' in its "
            "tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        declared = _declared_pad_token(path, tokenizer)
        tokenizer.pad_token = tokenizer.eos_token if declared is None else declared
    return tokenizer


def _declared_pad_token(path: pathlib.Path, tokenizer: Tokenizer) -> str | None:
    """The special token that the model's files name as `pad_token_id`, if one does."""
    special = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    for name in ("generation_config.json", "config.json"):
        token_id = _read_settings(path / name).get("pad_token_id")
        if type(token_id) is int and token_id in special:  # -1 and others' ids occur
            return special[token_id]
    return None


def _read_settings(file: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is none."""
    try:
        return read_json_object(file)
    except FileNotFoundError:
        return {}


def full_text(tokenizer: Tokenizer, ids: Int[np.ndarray, " T"] | Sequence[int]) -> str:
    """The whole text, with the special tokens and spaces that a template wrote."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def verifier_text(
    tokenizer: Tokenizer,
    ids: Int[np.ndarray, " T"] | Sequence[int],
    stop_strings: Sequence[str] = (),
) -> str:
    """Text of a response for a verifier, which is also the text that is recorded and shown.

    It ends before the first end marker or stop string. Other special tokens are left out.
    """
    markers = {i for i, t in tokenizer.added_tokens_decoder.items() if str(t) in END_MARKERS}
    end = next((at for at, token in enumerate(ids) if int(token) in markers), len(ids))
    if stop_strings:
        return response_text(before_stop(stop_text(tokenizer, ids[:end]), stop_strings))
    return response_text(tokenizer.decode(ids[:end], skip_special_tokens=True))


def check_same_tokens(field: str, path: str | os.PathLike[str], tokenizer: Tokenizer) -> None:
    """UserError if a model's directory gives a token another id than the policy's tokenizer."""
    with prefixed(f"{field}={str(path)!r}"):
        theirs, ours = load_tokenizer(path).get_vocab(), tokenizer.get_vocab()
    others = ", or set rewards.model.tokenizer='own'" if "reward" in field else ""
    for token in sorted(theirs.keys() | ours.keys(), key=lambda t: (ours.get(t, len(ours)), t)):
        if theirs.get(token) != ours.get(token):
            raise UserError(
                f"{field}={str(path)!r} has another tokenizer than the policy: the token "
                f"{token!r:.50} is {theirs.get(token, 'missing')} there and "
                f"{ours.get(token, 'missing')} in model.path; name a model of the same "
                f"tokenizer{others}."
            )


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Hex SHA-256 over the vocabulary, the merges, the special tokens, and bos, eos and pad.

    The role of the unknown token is left out: its default differs between library versions.
    """
    merges = []
    if getattr(tokenizer, "is_fast", False):
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        # Written as "a b" by older versions, as ["a", "b"] by newer ones.
        merges = [m.split(" ") if isinstance(m, str) else m for m in model.get("merges", ())]
    added = tokenizer.added_tokens_decoder
    content = {
        "vocabulary": tokenizer.get_vocab(),
        "merges": merges,
        "special": sorted((i, str(token)) for i, token in added.items() if token.special),
        "roles": {role: getattr(tokenizer, f"{role}_token") for role in ("bos", "eos", "pad")},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
