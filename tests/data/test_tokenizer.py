"""The character tokenizer in memory and on disk, loading, and the hash of tokenizers."""

import json
import subprocess
import sys

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax.data import character_tokenizer, check_same_tokens, load_tokenizer, tokenizer_hash
from semrl_jax.data.tokenizer import _SETTINGS_FILES, CHARACTERS
from semrl_jax.support.errors import UserError
from tests.cases import refused


@pytest.fixture
def directory(tmp_path):
    character_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_symbols(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 34
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 11]) == ["<pad>", "<eos>", "0", "9"]
    assert tokenizer(CHARACTERS)["input_ids"] == list(range(2, 34))


@given(text=st.text(CHARACTERS, max_size=80))
def test_round_trip_is_exact(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)  # nothing added
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([0, 0, *ids, 1], skip_special_tokens=True) == text


@pytest.mark.parametrize("model_type", [None, "qwen2", "qwen3", "llama"])
def test_a_model_config_does_not_change_the_tokenizer(tokenizer, directory, model_type):
    """transformers picks its class by the model's config, and Qwen2's rebuilds the tokenizer."""
    if model_type:
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = transformers.AutoTokenizer.from_pretrained(directory)
    text = "Q:380+882\nA: 38\n\n  \\boxed{12}"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert len(loaded) == 34
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    assert tokenizer_hash(loaded) == tokenizer_hash(tokenizer)


def bpe(vocabulary=("a", "b", "ab", "ba"), merges=(("a", "b"),), **roles):
    model = tokenizers.models.BPE({s: i for i, s in enumerate(vocabulary)}, list(merges))
    backend = tokenizers.Tokenizer(model)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


def test_different_tokenizers_have_different_hashes():
    distinct = [
        bpe(),
        bpe(vocabulary=("b", "a", "ab", "ba")),
        bpe(merges=()),
        bpe(merges=[("b", "a")]),
        bpe(eos_token="a"),
        bpe(pad_token="a"),
        bpe(eos_token="<new>"),
    ]
    assert len({tokenizer_hash(t) for t in distinct}) == len(distinct)
    assert tokenizer_hash(bpe()) == tokenizer_hash(bpe())


def test_use_does_not_change_the_hash(tokenizer):
    before = tokenizer_hash(tokenizer)
    tokenizer(["1", "12"], padding=True, truncation=True, max_length=1)
    assert tokenizer_hash(tokenizer) == before


def test_what_cannot_be_loaded_is_the_users_error(tmp_path, directory):
    refused(r"'.*/absent' does not exist; give", load_tokenizer, tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    refused(r"'.*/empty' holds no tokenizer", load_tokenizer, tmp_path / "empty")
    (directory / "tokenizer.json").write_text("{")
    refused("no tokenizer can be loaded", load_tokenizer, directory)


def drop_role(directory, role):
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config[f"{role}_token"]
    path.write_text(json.dumps(config))


def test_missing_end_token_is_the_users_error(directory):
    drop_role(directory, "eos")
    refused("has no eos token; name one as 'eos_token'", load_tokenizer, directory)


@pytest.mark.parametrize(
    ("files", "pad_token"),
    [
        ({}, "<eos>"),
        ({"config.json": {"model_type": "llama"}}, "<eos>"),
        ({"config.json": {"model_type": "llama", "pad_token_id": 0}}, "<pad>"),
        ({"generation_config.json": {"pad_token_id": 0}}, "<pad>"),
        (
            {"generation_config.json": {"pad_token_id": 1}, "config.json": {"pad_token_id": 0}},
            "<eos>",
        ),
        # Not outside the vocabulary, and not a digit, which decoding would then drop.
        ({"config.json": {"model_type": "llama", "pad_token_id": -1}}, "<eos>"),
        ({"config.json": {"model_type": "llama", "pad_token_id": 5}}, "<eos>"),
    ],
)
def test_missing_pad_token_is_the_declared_or_the_end_token(directory, files, pad_token):
    before = tokenizer_hash(load_tokenizer(directory))
    drop_role(directory, "pad")
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(directory)
    assert tokenizer.pad_token == pad_token
    assert tokenizer.pad_token_id == {"<pad>": 0, "<eos>": 1}[pad_token]
    assert len(tokenizer) == 34  # nothing was added
    assert tokenizer.decode([5, 2, 1], skip_special_tokens=True) == "30"
    assert tokenizer_hash(tokenizer) == tokenizer_hash(load_tokenizer(directory))
    assert (tokenizer_hash(tokenizer) == before) is (pad_token == "<pad>")


@pytest.mark.parametrize("content", ["{", "null"])
@pytest.mark.parametrize("name", _SETTINGS_FILES)
def test_a_damaged_file_is_named(directory, name, content):
    (directory / name).write_text(content)
    refused(rf"/{name} (is not JSON|must hold a JSON object)", load_tokenizer, directory)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tokenizer_config.json", {"tokenizer_class": 7}),
        ("tokenizer_config.json", {"eos_token": 3}),
        ("tokenizer_config.json", {"added_tokens_decoder": []}),
        ("tokenizer_config.json", {"model_max_length": "long"}),
        ("tokenizer.json", {"model": None}),
        ("tokenizer.json", {"added_tokens": [{"id": -1}]}),
        ("tokenizer.json", {"decoder": [[]] * 10_000}),
        ("config.json", {"model_type": "llama", "num_attention_heads": 0}),
    ],
)
def test_files_that_transformers_rejects_are_the_users_error(directory, name, fields):
    file = directory / name
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | fields))
    assert len(refused("no tokenizer can be loaded from", load_tokenizer, directory)) < 500


def test_a_tokenizer_too_large_to_read_is_named(directory):
    with open(directory / "tokenizer.json", "r+b") as file:
        file.truncate(2**28 + 1)  # a sparse file
    refused(r"tokenizer\.json is larger than 256 MiB", load_tokenizer, directory)


def test_importing_data_loads_neither_transformers_nor_jax():
    program = (
        "import sys, semrl_jax.data\n"
        "bad = {'jax', 'transformers', 'torch', 'tokenizers', 'pyarrow'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_model_of_other_tokens_is_refused(tmp_path):
    ours = character_tokenizer()
    ours.save_pretrained(tmp_path)
    check_same_tokens("critic.path", tmp_path, ours)
    theirs = character_tokenizer()
    theirs.add_tokens("y")
    theirs.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"critic.path=.*token 'y' is 34 there and missing in"):
        check_same_tokens("critic.path", tmp_path, ours)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"critic.path=.*empty' holds no tokenizer"):
        check_same_tokens("critic.path", tmp_path / "empty", ours)
