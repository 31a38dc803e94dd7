"""The token at which a response ends, against decoding every prefix."""

import functools

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from semrl_jax import data
from semrl_jax.data.stop_strings import StopMatcher, TokenBytes, before_stop, stop_text
from semrl_jax.data.stop_words import STOP_WORDS, stop_word_ids
from semrl_jax.support.errors import UserError
from tests.cases import refused

TEXT = "Question: 你好, wörld! Answer: 😀 user\n Is 1 + 2 = 3?"


def fast(backend, **roles):
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


def sentencepiece_like(decoder):
    """BPE with byte fallback: letters, some words, and a token for each byte."""
    letters = [*dict.fromkeys(TEXT.replace(" ", "▁").replace("你", "").replace("😀", ""))]
    words = ["▁Question", "Question", "▁▁", "Ans", "wer", ":▁", "你好"]
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    model = tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoder
    tokenizer = fast(backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.add_tokens(["<tool>"])  # no special token: it has text
    return tokenizer


def llama_decoder():
    part = tokenizers.decoders
    return part.Sequence(
        [part.Replace("▁", " "), part.ByteFallback(), part.Fuse(), part.Strip(" ", 1, 0)]
    )


def joined_words():
    """Without a decoder: tokens are joined by spaces, which transformers would clean up."""
    names = ["[UNK]", "Question", "s", "Answer", ":", "user", ".", "你", "好"]
    vocabulary = {name: i for i, name in enumerate(names)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return fast(backend, unk_token="[UNK]", clean_up_tokenization_spaces=True)


@functools.cache
def tokenizer_of(kind):
    return {
        "characters": data.character_tokenizer,
        "byte-level": lambda: data.train_tokenizer([TEXT] * 3, 300),
        "sentencepiece": lambda: sentencepiece_like(llama_decoder()),
        "metaspace": lambda: sentencepiece_like(tokenizers.decoders.Metaspace()),
        "words": joined_words,
    }[kind]()


tokens_of = functools.cache(lambda kind: TokenBytes(tokenizer_of(kind)))


def first_stop(tokenizer, ids, stop_strings):
    """Number of tokens of the shortest prefix whose text contains a stop string, or None."""
    for count in range(1, len(ids) + 1):
        if any(text in stop_text(tokenizer, ids[:count]) for text in stop_strings):
            return count
    return None


def fed(matcher, ids, sizes):
    """The same number, from the matcher: the ids come in pieces of these sizes."""
    start = 0
    while start < len(ids):
        size = next(sizes)
        found = matcher.feed(ids[start : start + size])
        if found is not None:
            return start + found
        start += size
    return None


KINDS = ["characters", "byte-level", "sentencepiece", "metaspace", "words"]


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**31 - 1),
    is_text=st.booleans(),
    chunk=st.integers(1, 9),
)
def test_a_response_ends_at_the_first_prefix_with_a_stop_string(kind, seed, is_text, chunk):
    """On encoded text, and on random tokens, whose bytes are often no UTF-8."""
    tokenizer, random = tokenizer_of(kind), np.random.default_rng(seed)
    if is_text:
        words = random.permutation(TEXT.split(" "))
        ids = tokenizer.encode(" ".join(words) * 2, add_special_tokens=False)
        ids = ids[int(random.integers(3)) :]
    else:
        ids = random.integers(0, len(tokenizer) + 3, 40).tolist()  # some beyond the vocabulary
    text = stop_text(tokenizer, ids)
    stops = []
    for _ in range(int(random.integers(1, 4))):
        start, length = random.integers(0, max(len(text), 1)), random.integers(1, 7)
        stops.append(text[start : start + length].replace("\ufffd", "") or "absent")
    stops = random.permutation([*stops, "你", "absent"]).tolist()
    matcher = StopMatcher(tokens_of(kind), stops)
    sizes = iter(lambda: int(random.integers(1, chunk + 1)), 0)
    assert fed(matcher, ids, sizes) == first_stop(tokenizer, ids, stops)


@pytest.mark.parametrize(
    ("kind", "ids_of", "stop", "expected"),
    [
        # Bytes of a character come in three tokens.
        ("sentencepiece", lambda byte, of: [of["A"], byte(0xE4), byte(0xBD), byte(0xA0)], "你", 4),
        # A byte before them makes the whole run undecodable, so the text has no such character,
        # and none when the run goes on.
        (
            "sentencepiece",
            lambda byte, of: [byte(0xFF), *map(byte, "你".encode()), of["A"], of["你好"]],
            "你",
            6,
        ),
        # The decoder strips the space before the first token.
        ("sentencepiece", lambda byte, of: [of["▁Question"], of["▁Question"]], " Quest", 2),
        ("sentencepiece", lambda byte, of: [of["▁Question"], of[":▁"]], "Question:", 2),
        ("metaspace", lambda byte, of: [of["Ans"], of["wer"], of[":▁"]], "nswer: ", 3),
        # A special token between them adds no text; a token that is added but not special does.
        ("sentencepiece", lambda byte, of: [of["Ans"], of["</s>"], of["wer"]], "Answer", 3),
        ("sentencepiece", lambda byte, of: [of["Ans"], of["<tool>"]], "s<to", 2),
    ],
)
def test_borders_of_tokens(kind, ids_of, stop, expected):
    tokenizer = tokenizer_of(kind)
    vocabulary = tokenizer.get_vocab()
    ids = ids_of(lambda byte: vocabulary[f"<0x{byte:02X}>"], vocabulary)
    assert first_stop(tokenizer, ids, [stop]) == expected
    for chunk in (1, 2, len(ids)):
        assert fed(StopMatcher(tokens_of(kind), [stop]), ids, iter(lambda: chunk, 0)) == expected  # noqa: B023


def test_each_token_is_looked_up_once_and_a_response_is_decoded_once():
    """Linear time: the tokenizer is asked once per kind of token, and once at the stop string."""
    tokenizer, calls = tokenizer_of("sentencepiece"), []

    class Counting:
        is_fast, backend_tokenizer = True, tokenizer.backend_tokenizer
        added_tokens_decoder = tokenizer.added_tokens_decoder
        convert_ids_to_tokens = staticmethod(tokenizer.convert_ids_to_tokens)

        def decode(self, ids, **options):
            calls.append(len(ids))
            return tokenizer.decode(ids, **options)

    ids = tokenizer.encode("is 1 " * 400, add_special_tokens=False)
    matcher = StopMatcher(TokenBytes(Counting()), ["user", "1 2"])
    assert fed(matcher, ids, iter(lambda: 7, 0)) is None
    assert calls and len(calls) <= 2 * len(set(ids))
    calls.clear()
    assert matcher.feed(tokenizer.encode("user", add_special_tokens=False)) == 4
    assert [count for count in calls if count > 2] == [len(ids) + 4]


def test_text_for_the_verifier_ends_before_the_first_stop_string():
    assert before_stop("a user b assistant", ("assistant", "user")) == "a "
    assert before_stop("a user", ()) == before_stop("a user", ("b",)) == "a user"
    tokenizer = tokenizer_of("byte-level")
    ids = tokenizer.encode("你好 3 user: 4<|im_end|>user", add_special_tokens=False)
    assert data.verifier_text(tokenizer, ids) == "你好 3 user: 4"
    assert data.verifier_text(tokenizer, ids, ("er:", "好 3 u")) == "你"


@pytest.mark.parametrize("decoder", ["BPEDecoder", "WordPiece", "CTC"])
def test_a_decoder_that_looks_at_other_tokens_is_refused(decoder):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a</w>": 0}, []))
    backend.decoder = getattr(tokenizers.decoders, decoder)()
    refused(f"whose decoder is {decoder}; use rollout.stop_token_ids", TokenBytes, fast(backend))


def test_stop_words_are_the_tokens_with_this_text():
    tokenizer = tokenizer_of("sentencepiece")
    ids = stop_word_ids(tokenizer, ["Question", " Question", "</s>", "<tool>", ":", "Question"])
    names = ["Question", "▁Question", "</s>", "<tool>", ":"]
    assert ids == tuple(tokenizer.convert_tokens_to_ids(names))
    byte_level = tokenizer_of("byte-level")
    for token_id, name in enumerate(byte_level.convert_ids_to_tokens(range(len(byte_level)))):
        text = byte_level.decode([token_id])
        if "\ufffd" not in text:
            assert stop_word_ids(byte_level, [text]) == (token_id,), name
    assert stop_word_ids(tokenizer, ()) == ()
    with pytest.raises(UserError, match=r"'Answer', which is not one token; .* rollout.stop_str"):
        stop_word_ids(tokenizer, ["Answer"])


def test_presets_of_stop_words():
    words = ["[UNK]", *dict.fromkeys(word for words in STOP_WORDS.values() for word in words)]
    vocabulary = {word.replace(" ", "▁"): i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme="never")
    for name, expected in STOP_WORDS.items():
        found = stop_word_ids(fast(backend), [name, "user"])
        assert [words[i] for i in found] == list(dict.fromkeys([*expected, "user"]))
    with pytest.raises(UserError, match="has 'verl:gpt'; the presets are verl:llama, verl:mis"):
        stop_word_ids(fast(backend), ["verl:gpt"])
