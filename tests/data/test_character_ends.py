"""The tokens in which parts of a text end, against decoding every prefix."""

import numpy as np
import pytest

from semrl_jax import data
from semrl_jax.data.stop_strings import stop_text
from tests.data.test_stop_strings import TEXT, tokenizer_of, tokens_of


@pytest.mark.parametrize("kind", ["characters", "byte-level", "sentencepiece", "metaspace"])
def test_the_token_of_each_character_matches_decoded_prefixes(kind):
    tokenizer = tokenizer_of(kind)
    asked = "Answer: 1 + 2 = 3?\n" if kind == "characters" else TEXT
    ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
    if kind == "sentencepiece":  # a space before the first word, which the decoder strips
        ids = tokenizer("▁" + asked.replace(" ", "▁"), add_special_tokens=False)["input_ids"]
    ids = [*ids[:3], tokenizer.eos_token_id, *ids[3:]]  # a special token has no characters
    text = stop_text(tokenizer, ids)
    prefixes = [stop_text(tokenizer, ids[: n + 1]) for n in range(len(ids))]
    ends = range(1, len(text) + 1)
    expected = [next(n for n, p in enumerate(prefixes) if p.startswith(text[:e])) for e in ends]
    found = data.tokens_of_ends(tokens_of(kind), ids, text, ends)
    assert found.tolist() == expected and found.dtype == np.int32
    early = data.tokens_of_ends(tokens_of(kind), ids, text[:5], ends[:5])  # before a stop string
    assert early.tolist() == expected[:5]
