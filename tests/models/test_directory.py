"""Hugging Face directories: what we write transformers reads, and the other way round."""

import dataclasses
import errno
import json
import math
import os
import pathlib
import resource
import subprocess
import sys

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from semrl_jax import data, models
from semrl_jax.models import directory
from semrl_jax.support.errors import UserError
from tests.cases import raised, refused
from tests.models.conftest import FAMILIES, by_file_name, make_pair

REPOSITORY = pathlib.Path(__file__).parents[2]
NORM = "model.norm.weight"


# The others have the same tensors.
LAYOUTS = [name for name in FAMILIES if not name.endswith(("-window", "-linear", "-whole"))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A model whose output matrix is its embedding."""
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module", params=LAYOUTS)
def family_pair(request, tmp_path_factory):
    """One model of each family; every other one has a matrix of its own for the output."""
    tied = LAYOUTS.index(request.param) % 2 == 0
    directory = tmp_path_factory.mktemp(request.param)
    return make_pair(directory, request.param, tie_word_embeddings=tied)


def all_tensors(directory):
    """Every tensor of a directory, as written."""
    return {
        name: tensor
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize("tied", [True, False])
def test_saved_directory_loads_in_transformers_with_the_same_logits(tmp_path, tied):
    tokenizer = data.character_tokenizer()
    config = models.DecoderConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2,
        num_kv_heads=1, head_dim=32, tie_embeddings=tied,
    )  # fmt: skip
    policy = models.Policy(config)
    params = policy.init(jax.random.key(0))
    models.save_directory(tmp_path / "model", params, config, tokenizer)
    assert models.load_config(tmp_path / "model") == config
    loaded = models.load_params(tmp_path / "model", config)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert theirs.eos_token_id == model.config.eos_token_id
    assert models.eos_token_ids(tmp_path / "model") == (tokenizer.eos_token_id,)
    ids = np.arange(10, dtype=np.int32)[None]
    states = jax.jit(policy.final_states)(params, ids, ids, np.ones_like(ids))
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits[0].numpy()
    # Float32 sums in another order.
    np.testing.assert_allclose(policy.logits(params, states[0]), expected, rtol=1e-4, atol=1e-5)


def test_round_trips_are_bit_for_bit(family_pair, tmp_path):
    """Theirs -> ours -> theirs -> ours; transformers gives the same logits as from its own file."""
    pair, config = family_pair, family_pair.policy.config
    models.save_directory(tmp_path / "ours", pair.params, config, None, max_shard_bytes=40_000)
    assert_same_bits(all_tensors(tmp_path / "ours"), all_tensors(pair.directory))
    assert models.load_config(tmp_path / "ours") == config
    loaded = models.load_params(tmp_path / "ours", config)
    jax.tree.map(np.testing.assert_array_equal, loaded, pair.params)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(model) is type(pair.torch_model) and model.dtype == torch.float32
    ids = torch.arange(2, 60)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, pair.torch_model(ids).logits)
    # Shards that transformers makes are read as well.
    model.save_pretrained(tmp_path / "theirs", max_shard_size=40_000)
    assert not (tmp_path / "theirs" / "model.safetensors").exists()
    loaded = models.load_params(tmp_path / "theirs", config)
    jax.tree.map(np.testing.assert_array_equal, loaded, pair.params)


@pytest.mark.parametrize("family_pair", ["phi3"], indirect=True)
def test_fused_kernels_are_read_in_pieces_of_any_size(family_pair, monkeypatch):
    """Pieces of 5 rows lie across the border of query and key."""
    pair, config = family_pair, family_pair.policy.config
    assert config.declared.fused
    monkeypatch.setattr(directory, "PIECE_BYTES", 5 * 4 * config.hidden_size)
    loaded = models.load_params(pair.directory, config)
    jax.tree.map(np.testing.assert_array_equal, loaded, pair.params)


def test_shards_hold_at_most_what_was_asked(pair, tmp_path):
    arguments = tmp_path / "model", pair.params, pair.policy.config, None
    models.save_directory(*arguments, max_shard_bytes=40_000)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    sizes = [[tensor.nbytes for tensor in load_file(file).values()] for file in files]
    assert len(files) > 5
    assert all(sum(tensors) <= 40_000 or len(tensors) == 1 for tensors in sizes)
    assert [file.name for file in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(map(sum, sizes))
    for bad in (0, -1):
        with pytest.raises(UserError, match=f"max_shard_bytes={bad} must be"):
            models.save_directory(*arguments, max_shard_bytes=bad)


# Normal, subnormal and extreme values; casts to float32 are exact, so all must come back.
VALUES = {
    "float32": np.array([1.0, -2.5, 1e-45, -1e-40, 3e38, 1e-38, 0.0, -0.0], np.float32),
    "bfloat16": np.array([1.0, -2.5, 9.2e-41, -1e-39, 3e38, 1e-38, 0.0, -0.0], ml_dtypes.bfloat16),
    "float16": np.array([1.0, -2.5, 6e-8, -1e-5, 65504.0, 7e-5, 0.0, -0.0], np.float16),
}


ONE, FOUR, EIGHT = (1, 1, 1, 1), (1, 2, 1, 2), (2, 2, 1, 2)


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("float32", ONE),
        ("float16", ONE),
        ("bfloat16", FOUR),
        # Each device compiles programs of its own: too slow for the fast suite.
        *(
            pytest.param(dtype, sizes, marks=mark)
            for dtype, sizes, mark in (
                ("float32", EIGHT, pytest.mark.slow), ("bfloat16", ONE, pytest.mark.soak),
                ("float32", FOUR, pytest.mark.soak), ("float16", (8, 1, 1, 1), pytest.mark.soak),
                ("bfloat16", (1, 8, 1, 1), pytest.mark.soak),
            )
        ),
    ],
)  # fmt: skip
def test_every_dtype_and_sharding_gives_the_files_values(tmp_path, dtype, sizes, monkeypatch):
    """Pieces of at most 20 rows of the embedding: they end in the middle of devices' parts."""
    monkeypatch.setattr("semrl_jax.models.directory.PIECE_BYTES", 20 * 32 * 4)
    config = models.DecoderConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, model_type="qwen3",
    )  # fmt: skip
    random = np.random.default_rng(0)
    tensors = {
        spec.name: random.choice(VALUES[dtype], spec.shape)
        for spec in models.tensor_specs(config, dtype)
    }
    policy = models.Policy(config)
    host = models.params_from_hf((models.Piece(n, 0, t) for n, t in tensors.items()), config)
    models.save_directory(tmp_path / "model", host, config, None, dtype=dtype)
    assert_same_bits(load_file(tmp_path / "model" / "model.safetensors"), tensors)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == dtype
    gate = tensors["model.layers.1.mlp.gate_proj.weight"].astype(np.float32)
    expected = models.load_params(tmp_path / "model", config)
    assert expected["layers"]["gate"]["kernel"][1].tobytes() == gate.T.tobytes()
    jax.tree.map(np.testing.assert_array_equal, expected, host)
    mesh = models.make_mesh(dict(zip(models.AXES, sizes)), jax.devices()[: math.prod(sizes)])
    shardings = models.parameter_shardings(policy.shapes(), mesh)
    sharded = models.load_params(tmp_path / "model", config, shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, sharded) == shardings
    for leaf, want in zip(jax.tree.leaves(sharded), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == jnp.float32
        for shard in leaf.addressable_shards:
            assert np.asarray(shard.data).tobytes() == want[shard.index].tobytes()


def test_parameters_have_the_tree_of_the_policy(family_pair):
    shapes = family_pair.policy.shapes()
    assert jax.tree.map(np.shape, shapes) == jax.tree.map(np.shape, family_pair.params)
    mesh = models.make_mesh({}, jax.devices()[:1])
    # Every name has a row in the table.
    shardings = models.parameter_shardings(shapes, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(shapes)


def test_streamed_names_are_those_of_transformers(family_pair, tmp_path):
    pair, config = family_pair, family_pair.policy.config
    ours = {spec.name: spec.shape for spec in models.tensor_specs(config, "float32")}
    # A file has a tensor per expert, where the module has one of all.
    pair.torch_model.save_pretrained(tmp_path)
    theirs = load_file(tmp_path / "model.safetensors")
    if config.declared.fused:  # only files have fused kernels
        theirs = {name: array for name, array in by_file_name(theirs).items() if name in ours}
    assert ours == {name: tensor.shape for name, tensor in theirs.items()}
    for spec, array in models.iterate_hf_tensors(pair.params, config, "float32"):
        np.testing.assert_array_equal(array, theirs[spec.name])
        assert array.nbytes == spec.num_bytes


def test_harmless_extras_are_ignored(pair, tmp_path):
    tensors = load_file(pair.directory / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = models.load_params(tmp_path, pair.policy.config)
    jax.tree.map(np.testing.assert_array_equal, loaded, pair.params)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"eos_token_id": 2**64}, "eos_token_id=18446744073709551616 must be a token id"),
        ({"eos_token_id": 2**31}, "eos_token_id=2147483648 must be a token id, below"),
        ({"eos_token_id": -1}, "eos_token_id=-1 must be"),
        ({"eos_token_id": True}, "eos_token_id=True must be"),
        ({"eos_token_id": 1.0}, "eos_token_id=1.0 must be"),
        ({"eos_token_id": [1, [2]]}, r"eos_token_id=\[1, \[2\]\] must be"),
        ({"eos_token_id": {"1": 1}}, "eos_token_id={'1': 1} must be"),
        ({"eos_token_id": [1] * 1001}, r"eos_token_id=\[1, 1,.* a list of at most 1000"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>' must be"),
        ({"eos_token_id": [1, None]}, r"eos_token_id=\[1, None\] must be"),
        ([], "must hold a JSON object, not list"),
    ],
)
def test_invalid_end_tokens_are_refused(tmp_path, content, message):
    for name in ("generation_config.json", "config.json"):
        (tmp_path / name).write_text(json.dumps(content))
        assert len(refused(rf"{name}.*{message}", models.eos_token_ids, tmp_path)) < 500
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / "generation_config.json")
    refused("is no regular file", models.eos_token_ids, tmp_path)


def test_a_tied_head_that_is_not_its_embedding_is_named(pair, tmp_path):
    """Without an embedding, or with a dtype that is not read, nothing is compared."""
    config = dataclasses.replace(pair.policy.config, tie_embeddings=True)
    tensors = load_file(pair.directory / "model.safetensors")
    head = tensors.pop("model.embed_tokens.weight")
    tensors["lm_head.weight"] = head
    save_file(tensors, tmp_path / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"index\.json: model\.embed_tokens\.weight is missing"):
        models.load_params(tmp_path, config)
    tensors |= {"lm_head.weight": head[1:].astype(np.int8), "model.embed_tokens.weight": head}
    save_file(tensors, tmp_path / "model.safetensors")
    refused(r"lm_head\.weight has shape", models.load_params, tmp_path, config)
    # transformers would not tie then: other logits, and not a word.
    tensors["lm_head.weight"] = head.copy()
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head.weight differs from .*tie_word_embeddings=false"):
        models.load_params(tmp_path, config)


@pytest.mark.parametrize("end", ["", ".writing", ".replaced"])
def test_saving_does_not_follow_links(pair, tmp_path, end):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("years of work")
    (tmp_path / f"model{end}").symlink_to(tmp_path / "mine", target_is_directory=True)
    models.save_directory(tmp_path / "model", pair.params, pair.policy.config, None)
    assert (tmp_path / "mine" / "config.json").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "model"]
    assert models.load_config(tmp_path / "model") == pair.policy.config


def test_disk_error_inside_a_library_becomes_oserror(pair, tmp_path):
    """Only those are told in one line."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            models.save_directory(tmp_path / "model", pair.params, pair.policy.config, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno == errno.EFBIG
    assert not (tmp_path / "model").exists()


def test_files_that_cannot_be_read_are_named(pair, tmp_path):
    config = pair.policy.config
    refused(r"'nowhere' does not exist", models.load_config, "nowhere")
    refused(r"'nowhere' does not exist", models.load_params, "nowhere", config)
    refused(r"config\.json is missing", models.load_config, tmp_path)
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object, not list"),
        ("[" * 100_000, "nested more than 100 deep"),
        ('{"run_id": "a", "config": {}}', r"of a run, not of a model.* launch.convert --source=/"),
    ):
        (tmp_path / "config.json").write_text(text)
        refused(message, models.load_config, tmp_path)
    with pytest.raises(UserError, match=r"model.safetensors is missing, and so is model.safet"):
        models.load_params(tmp_path, config)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"holds pytorch_model.bin .* pickles are not read; conve"):
        models.load_params(tmp_path, config)
    whole = (pair.directory / "model.safetensors").read_bytes()
    for content in (b"", b"nonsense", whole[: len(whole) // 2], whole[:-1], whole[:100]):
        (tmp_path / "model.safetensors").write_bytes(content)
        refused(r"model.safetensors cannot be read", models.load_params, tmp_path, config)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (NORM, None, f"model.safetensors: {NORM} is missing"),
        ("extra", np.zeros(2), "extra is not part of the model"),
        (NORM, np.zeros(3, np.float32), rf"{NORM} has shape \(3,\), not \(64,\)"),
        (NORM, np.zeros(64, np.int8), rf"{NORM} is of dtype I8, not of \('F32', 'BF16', 'F16'\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(pair, tmp_path, name, tensor, message):
    tensors = load_file(pair.directory / "model.safetensors") | {name: tensor}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    refused(message, models.load_params, tmp_path, pair.policy.config)


SECOND = "model-00002-of-00002.safetensors"


def norm_in(place):
    """The index says that the norm lies there."""
    return lambda directory, index: index["weight_map"].update({NORM: place})


def torn(directory, index):
    (directory / SECOND).write_bytes((directory / SECOND).read_bytes()[:-10])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda directory, index: (directory / SECOND).unlink(),
            f"{SECOND} is missing; .*lists it",
        ),
        (lambda directory, index: index["weight_map"].pop(NORM), f"index.json: {NORM} is missing"),
        (lambda directory, index: index.pop("weight_map"), "weight_map must map tensor names to f"),
        (lambda directory, index: index.update(weight_map=[[NORM, SECOND]]), "weight_map must map"),
        (norm_in("model-00001-of-00002.safetensors"), f"00001-of-00002.s.*: {NORM} is missing"),
        (norm_in("model-00003.safetensors"), r"model-00003.safetensors is missing"),
        (norm_in("../secret.safetensors"), f"{NORM} lies in '../secret.s.*, which is no file name"),
        (norm_in(3), f"{NORM} lies in 3, which is no file name"),
        (norm_in(".."), r"/\.\. is missing; .*index.json lists it"),
        (torn, f"{SECOND} cannot be read"),
    ],
)
def test_shards_that_do_not_fit_are_named(pair, tmp_path, change, message):
    directory, config = tmp_path / "model", pair.policy.config
    num_bytes = sum(spec.num_bytes for spec in models.tensor_specs(config, "float32"))
    models.save_directory(directory, pair.params, config, None, max_shard_bytes=num_bytes * 2 // 3)
    index_file = directory / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    change(directory, index)
    index_file.write_text(json.dumps(index))
    refused(message, models.load_params, directory, config)


def test_other_fields_of_the_original_config_are_kept(tmp_path):
    """Fields of Llama 3.2; the tokenizer's ids do not replace the original's three end tokens."""
    base = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "max_position_embeddings": 131072, "attention_bias": False, "mlp_bias": False,
        "rope_scaling": {
            "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "bos_token_id": 3, "eos_token_id": [5, 6, 7], "pretraining_tp": 1, "use_cache": True,
        "initializer_range": 0.02, "torch_dtype": "bfloat16", "auto_map": {"AutoModel": "code.py"},
    }  # fmt: skip
    config = models.config_from_hf(base)
    params = models.Policy(config).init(jax.random.key(0))
    models.save_directory(tmp_path / "model", params, config, data.character_tokenizer(), base=base)
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert written["bos_token_id"] == 3 and written["eos_token_id"] == [5, 6, 7]
    assert written["initializer_range"] == 0.02 and written["pretraining_tp"] == 1
    assert written["dtype"] == "float32"
    assert "torch_dtype" not in written and "auto_map" not in written
    assert models.eos_token_ids(tmp_path / "model") == (5, 6, 7)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.rope_parameters["factor"] == 32.0
    assert model.config.rope_parameters["rope_theta"] == 500000.0
    models.save_directory(tmp_path / "model", params, config, None, base=base, eos_token_id=(9, 8))
    assert models.eos_token_ids(tmp_path / "model") == (9, 8)
    other = base | {"original_max_position_embeddings": 77}
    with pytest.raises(UserError, match="is of another model"):
        models.save_directory(tmp_path / "model", params, config, None, base=other)


def test_a_failed_save_leaves_the_old_directory(pair, tmp_path, monkeypatch):
    arguments = tmp_path / "model", pair.params, pair.policy.config, None
    models.save_directory(*arguments)
    (tmp_path / "model" / "mark").write_text("old")

    def full_disk(*_, **__):
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr("semrl_jax.models.directory.write_tensors", full_disk)
        raised(OSError, "no space", models.save_directory, *arguments)
    assert (tmp_path / "model" / "mark").read_text() == "old"
    models.save_directory(*arguments)
    assert not (tmp_path / "model" / "mark").exists()
    assert [child.name for child in tmp_path.iterdir()] == ["model"]
    refused("dtype='int8' must be one of", models.save_directory, *arguments, dtype="int8")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6, 7]}, {"eos_token_id": 5}, (5, 6, 7)),
        ({"eos_token_id": 5}, {"eos_token_id": [6]}, (5,)),
        ({"eos_token_id": None}, {"eos_token_id": [6, 5]}, (6, 5)),
        (None, {"eos_token_id": 0}, (0,)),
        (None, {}, ()),
        (None, None, ()),
    ],
)
def test_end_ids_come_from_generation_config_then_config(tmp_path, generation, config, expected):
    for name, content in (("generation_config", generation), ("config", config)):
        if content is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert models.eos_token_ids(tmp_path) == expected


def test_local_directories_are_found_and_missing_ones_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "model").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    assert models.find_directory("runs/model") == pathlib.Path("runs/model")
    assert models.find_directory(str(tmp_path)) == tmp_path

    def no_hub(*_, **__):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_hub)
    for path in (
        "/nowhere/model", "./nowhere/model", "../nowhere", "~/model", "nowhere", "a/b/c", "a/",
        "runs/other", "a b/c",
    ):  # fmt: skip
        refused(r"model directory '.*' does not exist; give a lo", models.find_directory, path)
    refused("'file' is a file", models.find_directory, "file")


def test_hub_ids_are_fetched_without_code_and_pickles(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(repo_id, *, allow_patterns, ignore_patterns):
        wanted = [
            "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
            "tokenizer.json", "tokenizer.model", "merges.txt", "vocab.json", "chat_template.jinja",
        ]  # fmt: skip
        refused = [
            "pytorch_model.bin", "modeling.py", "model.pth", "onnx/config.json", "training.pt",
            "original/consolidated.safetensors", "README.md", "model.gguf",
        ]  # fmt: skip
        kept = huggingface_hub.utils.filter_repo_objects(
            wanted + refused, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        asked[repo_id] = (list(kept), wanted)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert models.find_directory("some-owner/Some.Model_1-B") == tmp_path
    kept, wanted = asked["some-owner/Some.Model_1-B"]
    assert kept == wanted


HTTP_ERROR = huggingface_hub.errors.HTTPError("server disconnected")


@pytest.mark.parametrize("failure", [None, HTTP_ERROR, KeyError("id"), OSError("no route")])
def test_a_hub_that_does_not_answer_is_one_line(failure, tmp_path, monkeypatch):
    """None: conftest.py sets HF_HUB_OFFLINE, so nothing leaves the machine."""
    assert huggingface_hub.constants.HF_HUB_OFFLINE

    def snapshot_download(*_, **__):
        raise failure

    if failure is not None:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    message = r"'owner/name' is no local dir.*hub did not give it.*give its dir"
    refused(message, models.find_directory, "owner/name")


MEASURE = """
import os, pathlib, sys
import jax
from benchmarks.machine import peak_mib
from semrl_jax import models

way, directory = sys.argv[1], pathlib.Path(sys.argv[2])
config, shardings = models.load_config(directory), None
jax.block_until_ready(jax.numpy.zeros(1))
if way == "devices":
    mesh = models.make_mesh({"replica": 1, "fsdp": -1, "sequence": 1, "tensor": 1})
    shardings = models.parameter_shardings(models.Policy(config).shapes(), mesh)
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
before = peak_mib(os.getpid())
loaded = models.load_params(directory, config, shardings)
print(peak_mib(os.getpid()) - before)
"""


@pytest.mark.parametrize(
    ("way", "max_shard_bytes"),
    [
        pytest.param("host", 10**10, marks=pytest.mark.soak),
        pytest.param("host", 10**8, marks=pytest.mark.slow),
        pytest.param("devices", 10**10, marks=pytest.mark.slow),
        pytest.param("devices", 10**8, marks=pytest.mark.soak),
    ],
)
def test_loading_holds_the_parameters_and_one_layer(tmp_path, way, max_shard_bytes):
    """Peak of resident memory in a process of its own; the embedding is larger than a layer."""
    config = models.DecoderConfig(
        vocab_size=50_000, hidden_size=1024, intermediate_size=4096, num_layers=5, num_heads=16,
        num_kv_heads=4, head_dim=64, tie_embeddings=False,
    )  # fmt: skip
    specs = models.tensor_specs(config, "float32")
    params = models.params_from_hf(
        (models.Piece(spec.name, 0, np.full(spec.shape, 0.5, np.float32)) for spec in specs), config
    )
    models.save_directory(
        tmp_path / "model", params, config, None, dtype="float32", max_shard_bytes=max_shard_bytes
    )
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, way, str(tmp_path / "model")],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    held = sum(spec.num_bytes for spec in specs) / 2**20
    layer = sum(s.num_bytes for s in specs if s.name.startswith("model.layers.0.")) / 2**20
    # Resident memory also counts the allocator's own pages and modules that are imported late,
    # 7 MiB on a busy machine. A second layer would be 58 MiB.
    slack = 0.3 * layer
    assert 0.95 * held < float(result.stdout) < held + layer + slack
