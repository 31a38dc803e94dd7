"""Stop words: words that are single tokens, at which a response ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from semrl_jax.data.stop_strings import TokenBytes, byte_level_alphabet
from semrl_jax.support.errors import UserError

# The words whose tokens end a response in the release, by family of models.
# Source: vllm_rollout.py of the reference implementation (hf618/VERL), which has their ids. Those
# of its Mistral-7B are pieces of " Question", " Answer" and "\nStep"; see docs/verl.md. Left out:
# deepseek-math, for which it has five ids and names three words.
STOP_WORDS = {
    "verl:llama": ("Question", "Answer"),
    "verl:mistral-7b": (" Question", "Question", " Answer", "Step", "Pro", "An"),
    "verl:mistral-24b": ("_end", "istant", "user", "_start"),
    "verl:qwen2.5-7b": (
        "<|im_end|>", "<|endoftext|>", "user", "assistant", "User", "Assistant", "<|im_start|>",
        "system",
    ),
    "verl:qwen2.5-math-7b": (
        "<|im_end|>", "<|endoftext|>", "user", "assistant", "User", "Assistant", "<|im_start|>",
        "system", "```",
    ),
    "verl:qwen2.5-small": ("Question", "Answer", "Problem"),  # 3B, 1.5B and 0.5B
}  # fmt: skip


def expand_stop_words(words: Sequence[str]) -> tuple[str, ...]:
    """The words, with those of each preset in place of its name; raises UserError as named."""
    found = []
    for word in words:
        if word.startswith("verl:") and word not in STOP_WORDS:
            raise UserError(
                f"rollout.stop_words has {word!r}; the presets are {', '.join(STOP_WORDS)}."
            )
        found += STOP_WORDS.get(word, (word,))
    return tuple(dict.fromkeys(found))


def stop_word_ids(tokenizer: Any, words: Sequence[str]) -> tuple[int, ...]:
    """The token id of each word, spelled as in the text: " Answer" has its space, "Answer" none.

    Names of STOP_WORDS stand for their words. UserError if a word is not one token.
    """
    if not words:
        return ()
    vocabulary, tokens = tokenizer.get_vocab(), TokenBytes(tokenizer)
    special = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
    ids = []
    for word in expand_stop_words(words):
        # Spellings of BPE on characters, of sentencepiece and of byte-level BPE.
        spellings = word, word.replace(" ", "▁"), "".join(letters[b] for b in word.encode())
        candidates = [vocabulary[name] for name in spellings if name in vocabulary]
        found = [i for i in candidates if tokens[i] == word.encode()]
        if word in special:
            found = [special[word]]
        if not found:
            raise UserError(
                f"rollout.stop_words has {word!r}, which is not one token; spell a space before it "
                "as part of the word, or use rollout.stop_strings."
            )
        ids.append(found[0])
    return tuple(dict.fromkeys(ids))
