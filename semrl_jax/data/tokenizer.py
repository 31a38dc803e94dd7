"""Tokenizers: the quickstart's character tokenizer, loading from a directory, a fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import Any

from semrl_jax.errors import UserError

PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"
CHARACTERS = "0123456789+-*=,;:()?\n QA\\boxed{}"

# A transformers.PreTrainedTokenizerBase. That import takes seconds, so it waits until it is needed.
Tokenizer = Any


def character_tokenizer() -> Tokenizer:
    """Makes the tokenizer of 34 symbols, one for each character, `<pad>` (0) and `<eos>` (1).

    It is byte-level BPE without merges, because transformers gives every directory with a Qwen2
    model such a tokenizer whatever its tokenizer_config.json says: this one survives that
    unchanged. Characters outside the 32 are dropped.
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
        unk_token=None,  # said aloud: left out, Qwen2's is added as a 35th symbol
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def save_character_tokenizer(path: str | os.PathLike[str]) -> None:
    """Writes tokenizer.json and tokenizer_config.json for `transformers.AutoTokenizer`."""
    path = pathlib.Path(path)
    character_tokenizer().save_pretrained(path)
    config_path = path / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    # The name that older transformers, in the replica's environment, know as well.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads a tokenizer from a local Hugging Face directory; runs none of its code.

    One without a padding token, such as Llama's, is given the one that the directory's
    generation_config.json or config.json declares, if it is a special token, else the end token:
    padding is told apart by masks, never by its id. A padding token that is no special token would
    vanish from decoded text.

    Raises:
      UserError: if there is no such directory, no tokenizer in it, or no end token.
    """
    path = pathlib.Path(path)
    if not path.is_dir():
        raise UserError(
            f"tokenizer directory {str(path)!r} does not exist; give a local Hugging Face "
            "directory with a tokenizer.json."
        )
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        # transformers would make an empty tokenizer of the model's family.
        raise UserError(
            f"{str(path)!r} holds no tokenizer: one of {', '.join(_TOKENIZER_FILES)} is needed."
        )
    import transformers
    from huggingface_hub.errors import StrictDataclassError  # a field of wrong type in config.json

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, StrictDataclassError) as e:
        reason = " ".join(str(e).split())[:200]
        raise UserError(f"no tokenizer can be loaded from {str(path)!r}: {reason}") from e
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
        try:
            content = json.loads((path / name).read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as e:
            raise UserError(f"{str(path / name)!r} cannot be read: {e}") from e
        token_id = content.get("pad_token_id") if isinstance(content, dict) else None
        if type(token_id) is int and token_id in special:  # -1 and others' ids occur
            return special[token_id]
    return None


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Fingerprints what decides the meaning of token ids.

    Returns:
      Hex SHA-256 over the vocabulary, the merges, the special tokens among the added ones, and the
      tokens of the roles bos, eos and pad. The unknown token's role is left out: library versions
      differ in which they assume.
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
