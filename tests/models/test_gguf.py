"""GGUF files of every family against transformers' own reading; damage, what is not supported."""

import os
import pathlib
import subprocess
import sys

import gguf as library
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from semrl_jax import data, models
from semrl_jax.models import gguf
from semrl_jax.support.errors import UserError
from tests.cases import refused
from tests.models.conftest import make_pair

TYPES = library.GGMLQuantizationType
# Kinds of weights that the library can write; a row of 64 numbers is two blocks.
KINDS = [
    TYPES.F32, TYPES.F16, TYPES.BF16, TYPES.Q8_0, TYPES.Q5_1, TYPES.Q5_0, TYPES.Q4_1, TYPES.Q4_0,
]  # fmt: skip
GEMMA = {  # defaults: transformers takes no other sizes from a file
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "layer_types": None,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "final_logit_softcapping": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
# architecture of the file: family of the tests, and other options.
ARCHITECTURES = {
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128}),  # transformers takes no other from a file
    "qwen3moe": ("qwen3-moe", {}),
    "gemma3": ("gemma3", GEMMA),
}
OWN_NAMES = {theirs: ours for ours, theirs in gguf.FIELDS.items()}


def write(file, directory, architecture, kinds=(TYPES.F32,), tokenizer=None, **fields):
    """Writes a Hugging Face directory as GGUF; `fields` replace its fields, None removes one."""
    config = models.load_config(directory)
    hf = transformers.AutoConfig.from_pretrained(directory)
    if architecture == "gemma3":
        hf.rope_theta = config.rope_theta
    values = {name: getattr(hf, name, None) for name in OWN_NAMES}
    values["rope_theta"] = config.rope_theta
    values["head_dim"] = config.head_dim
    written = {f"{architecture}.{OWN_NAMES[name]}": value for name, value in values.items()}
    if config.experts is None:
        written = {name: value for name, value in written.items() if "expert" not in name}
    if config.sliding_window is None:
        written.pop(f"{architecture}.attention.sliding_window")
    written |= {"tokenizer.ggml.eos_token_id": 1, **byte_level_tokens(), **fields}
    writer = library.GGUFWriter(file, written.pop("general.architecture", architecture))
    for name, value in written.items():
        add(writer, name, value)
    tensors, arrays = {}, load_file(directory / "model.safetensors")
    for tensor in gguf.hf_tensors(config):
        array = arrays[tensor.name]
        module = tensor.path[-2]
        if architecture == "llama" and module in ("query", "key"):
            pairs = array.reshape(-1, 2, config.head_dim // 2, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        if architecture == "gemma3" and module.endswith("norm"):
            array = array + 1
        tensors.setdefault(gguf._name(tensor), []).append(array)
    if config.rope_scaling is not None:
        factors = gguf._llama3_factors(config.head_dim, config.rope_theta, LLAMA3)
        tensors[gguf.ROPE_FACTORS] = [factors.astype(np.float32)]
    for index, (name, parts) in enumerate(tensors.items()):
        array = np.stack(parts) if "_exps" in name else parts[0]
        is_quantised = array.ndim > 1 and array.shape[-1] % 32 == 0
        kind = kinds[index % len(kinds)] if is_quantised else TYPES.F32
        writer.add_tensor(name, library.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add(writer, name, value):
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
             str: writer.add_string, list: writer.add_array}  # fmt: skip
    if value is not None:
        kinds[type(value)](name, value)


def byte_level_tokens():
    from semrl_jax.data.stop_strings import byte_level_alphabet

    tokens = ["<pad>", "<eos>", *list(byte_level_alphabet())[:93], "ab", "Ġa"]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3] + [1] * 95,
        "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }  # fmt: skip


@pytest.fixture(scope="module", params=ARCHITECTURES)
def made(request, tmp_path_factory):
    family, options = ARCHITECTURES[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    tied = request.param in ("gemma3", "qwen2")
    make_pair(directory, family, tie_word_embeddings=tied, **options)
    file = write(directory / "model.gguf", directory, request.param, KINDS)
    gguf.convert(file, directory / "converted")
    return request.param, file, directory / "converted"


def logits_of(directory, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32", **options)
    token_ids = torch.tensor(np.random.default_rng(0).integers(2, 97, (2, 40)))
    with torch.no_grad():
        return model.eval()(token_ids).logits.numpy(), token_ids.numpy().astype(np.int32)


def test_logits_equal_those_of_transformers_reading_the_file(made):
    architecture, file, converted = made
    config = models.load_config(converted)
    params = jax.device_put(models.load_params(converted, config))
    theirs, token_ids = logits_of(converted)
    policy = models.Policy(config)
    token_ids = jnp.asarray(token_ids)
    positions = jnp.broadcast_to(jnp.arange(40), (2, 40))
    states = policy.final_states(params, token_ids, positions, jnp.ones_like(token_ids))
    ours = policy.logits(params, states.reshape(-1, 64)).reshape(theirs.shape)
    # Float32 with another order of sums.
    np.testing.assert_allclose(ours, theirs, atol=2e-4 * np.abs(theirs).max())
    if architecture == "qwen3moe":
        return  # transformers cannot read this one
    by_file, _ = logits_of(file.parent, gguf_file=file.name)
    if architecture == "llama":  # transformers leaves the scaling out: it differs with the position
        assert config.rope_scaling == models.decoder_config.RopeScaling(
            "llama3", 8.0, 1.0, 4.0, 8192
        )
        by_file, theirs = by_file[:, 0], theirs[:, 0]
    np.testing.assert_array_equal(theirs, by_file)


def test_the_tokenizer_and_the_template_come_along(made):
    _, _, converted = made
    tokenizer = data.load_tokenizer(converted)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<eos>", "<pad>")
    ids = tokenizer("ab ab<eos>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids)[0] == "ab" and ids[-1] == 1
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert chat == "ab"
    assert models.eos_token_ids(converted) == (1,)


@pytest.mark.parametrize(
    ("kind", "added", "tokens"),
    [
        ("llama-bpe", None, ["<pad>", "a", "Ġa"]),
        ("llama-bpe", False, ["a", "Ġa"]),
        ("tekken", None, ["<pad>", "a", "Ġa"]),
        ("qwen2", None, ["a", "a"]),  # no merge makes "Ġa", and "Ġ" is no token here
        ("qwen2", True, ["<pad>", "a", "a"]),
    ],
)
def test_the_kind_of_tokenizer_says_what_the_file_does_not(qwen, tmp_path, kind, added, tokens):
    """The first token, and whether words of the vocabulary need merges."""
    fields = {"pre": kind, "add_bos_token": added, "bos_token_id": 0}
    fields = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    made = gguf.Gguf(write(tmp_path / "x.gguf", qwen, "qwen2", **fields)).tokenizer()
    assert made.convert_ids_to_tokens(made("a a").input_ids) == tokens


def test_a_path_is_converted_once(made, tmp_path, monkeypatch, capsys):
    _, file, _ = made
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = models.find_directory(file)
    assert "converting" in capsys.readouterr().out
    assert models.find_directory(str(file)) == first
    assert capsys.readouterr().out == ""
    assert [entry.name for entry in (tmp_path / "semrl_jax").iterdir()] == [first.name]
    models.load_params(first, models.load_config(first))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen")
    make_pair(directory, "qwen2")
    return directory


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported; it must"),
        ({"qwen2.block_count": None}, "field 'num_hidden_layers' is missing"),
        ({"qwen2.block_count": 2}, r"blk.2.attn_k.bias is not part of the model; .* and 7 more"),
        ({"qwen2.block_count": 4}, "blk.3.attn_k.bias is missing"),
        ({"qwen2.feed_forward_length": 64}, r"ffn_down.weight has shape \(64, 96\), not"),
        ({"qwen2.embedding_length": 2**31}, "has shape|hidden_size"),
        ({"qwen2.attention.head_count": 0}, "attention.head_count must be whole numbers"),
        ({"qwen2.rope.dimension_count": 8}, "rope.dimension_count=8 must be head_dim=16"),
        ({"qwen2.rope.scaling.type": "yarn"}, "rope.scaling.type='yarn' is not supported"),
        ({"qwen2.attention.new_option": 1}, "qwen2.attention.new_option=1 is not supported"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model='bert' is not supported"),
        ({"tokenizer.ggml.pre": "other"}, "tokenizer.ggml.pre='other' is not supported"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges must be a list of texts"),
        ({"tokenizer.ggml.merges": ["x yz"]}, "no tokenizer can be built"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens must be texts"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_one_line(qwen, tmp_path, fields, message):
    file = write(tmp_path / "x.gguf", qwen, "qwen2", **fields)
    assert str(file) in refused(message, gguf.convert, file, tmp_path / "target")
    assert not list(tmp_path.glob("target*"))


def test_a_factor_without_a_type_is_linear(qwen, tmp_path):
    """llama.cpp reads it so."""
    for fields in ({}, {"qwen2.rope.scaling.type": "linear"}):
        fields = fields | {"qwen2.rope.scaling.factor": 4.0}
        source = gguf.Gguf(write(tmp_path / "x.gguf", qwen, "qwen2", **fields))
        scaling = models.config_from_hf(source.hf_config()).rope_scaling
        assert (scaling.rope_type, scaling.factor) == ("linear", 4.0)


def test_tokens_that_end_a_turn_or_a_message_end_a_response(qwen, tmp_path):
    fields = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2**32 - 1}
    gguf.convert(write(tmp_path / "x.gguf", qwen, "qwen2", **fields), tmp_path / "made")
    assert models.eos_token_ids(tmp_path / "made") == (1, 5)


def test_a_token_is_an_end_by_its_text(qwen, tmp_path):
    """llama.cpp finds an end of turn so where a file names only the end of a text."""
    tokens = byte_level_tokens()["tokenizer.ggml.tokens"]
    tokens[7] = "<end_of_turn>"
    file = write(tmp_path / "x.gguf", qwen, "qwen2", **{"tokenizer.ggml.tokens": tokens})
    assert gguf.Gguf(file).hf_config()["eos_token_id"] == [1, 7]


def test_a_damaged_file_is_one_line_or_another_model(qwen, tmp_path):
    """Truncated at 20 places, and 60 bytes flipped in the header."""
    content = write(tmp_path / "x.gguf", qwen, "qwen2").read_bytes()
    random = np.random.default_rng(0)
    damaged = [content[: int(n)] for n in np.linspace(0, len(content) - 1, 20)]
    for at in random.integers(0, 4000, 60):
        flipped = bytearray(content)
        flipped[at] ^= 1 << int(random.integers(8))
        damaged.append(bytes(flipped))
    file, refused = tmp_path / "damaged.gguf", 0
    for each in damaged:
        file.write_bytes(each)
        try:
            source = gguf.Gguf(file)
            config = models.config_from_hf(source.hf_config())
            source.check_tensors(config)
            source.tokenizer()
            assert all(array.size for array in source.arrays(config))
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 40


def test_a_directory_with_several_files_names_them(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    refused(r"holds 2 GGUF files \(a.gguf, b.gguf\)", models.find_directory, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert models.find_directory(tmp_path) == tmp_path


@pytest.mark.slow
def test_convert_writes_a_directory(qwen, tmp_path):
    file = write(tmp_path / "x.gguf", qwen, "qwen2")
    command = [sys.executable, "-m", "launch.convert", f"--source={file}", "--target=made"]
    options = {"cwd": tmp_path, "capture_output": True, "text": True}
    options["env"] = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    original = models.load_params(qwen, models.load_config(qwen))
    made = models.load_params(tmp_path / "made", models.load_config(tmp_path / "made"))
    jax.tree.map(np.testing.assert_array_equal, made, original)
    refused = subprocess.run([*command[:-1], "--target=other", "--step=3"], **options)
    assert refused.returncode == 2 and "leave out --step" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
