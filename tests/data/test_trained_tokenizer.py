"""A trained tokenizer: round trip of any text, chat turns, saving and loading."""

import pytest

from semrl_jax import data
from tests.cases import refused

TEXTS = [f"Tom has {n} apples and buys {n + 1} more. How many apples are there?" for n in range(50)]


@pytest.fixture(scope="module")
def tokenizer():
    return data.train_tokenizer(TEXTS, 280)


@pytest.mark.parametrize("text", [TEXTS[7], "Ω ≠ 已知 \\boxed{\\frac{1}{2}}\n\t\x00 🎲"])
def test_the_round_trip_is_exact_for_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_merges_are_learned(tokenizer):
    assert len(tokenizer) == 280
    assert len(tokenizer(TEXTS[7])["input_ids"]) < 0.7 * len(TEXTS[7])


def test_turns_are_single_tokens_and_end_a_response(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2?"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_a_saved_tokenizer_loads_unchanged(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    loaded = data.load_tokenizer(tmp_path)
    assert data.tokenizer_hash(loaded) == data.tokenizer_hash(tokenizer)
    assert loaded(TEXTS[7])["input_ids"] == tokenizer(TEXTS[7])["input_ids"]


def test_a_vocabulary_must_hold_the_bytes():
    refused("vocab_size=259 must be above 259", data.train_tokenizer, TEXTS, 259)
