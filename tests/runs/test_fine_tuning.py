"""Mistakes of a fine-tuning are named before any training, and leave no files."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from configs import default
from semrl_jax.runs import fine_tune
from tests.cases import refused
from tests.fixtures import read_rows, save_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Hugging Face directory with a random Qwen2 and a trained tokenizer."""
    return save_chat_model(tmp_path_factory.mktemp("models") / "tiny", "What is 1 plus 1?", 270)


@pytest.fixture
def config(model, tmp_path):
    file = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    file.write_text(json.dumps({"messages": chat}) + "\n")
    config = default.get_config()
    config.model.path = str(model)
    config.sft.files = (str(file),)
    config.sft.max_tokens = 128
    return config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sft.files": ("/nowhere.jsonl",)}, "sft.files: prompt file '/nowhere.jsonl' does not"),
        ({"sft.evaluation_files": ("/no.jsonl",)}, "sft.evaluation_files: prompt file '/no.jsonl'"),
        ({"sft.evaluation_files": ("CHATS", "CHATS")}, "two files have the same name"),
        ({"sft.max_tokens": 512}, "sft.max_tokens=512 must be at most the model's context of 256"),
        ({"sft.max_tokens": 9}, "none of the 1 conversations can be used within sft.max_tokens=9"),
        ({"sft.chat_template": "/no.jinja"}, "sft.chat_template='/no.jinja' cannot be read"),
        ({"sft.row_format": "prompt_completion"}, "chats.jsonl, line 1: field 'completion' is mis"),
        (
            {"sft.pack_sequences": False, "sft.micro_batch_tokens": 0, "sft.micro_batch_size": 3},
            "sft.micro_batch_size=3 must be a multiple of the 8 data shards",
        ),
        ({"sft.micro_batch_tokens": 129, "mesh.sequence": 2}, "must be a multiple of mesh.sequenc"),
        ({"model.path": "/nowhere"}, "model directory '/nowhere' does not exist"),
    ],
)
def test_a_mistake_is_named_and_leaves_no_files(config, tmp_path, fields, message):
    chats = config.sft.files[0]
    for name, value in fields.items():
        if isinstance(value, tuple):
            value = tuple(chats if item == "CHATS" else item for item in value)
        config.update_from_flattened_dict({name: value})
    assert message in refused(".", fine_tune, config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
def test_adapters_are_fine_tuned(config, tmp_path):
    """The base stays as it is; the model is merged, and a finished run is resumed without loss."""
    config.update_from_flattened_dict(
        {
            "lora.rank": 2, "lora.alpha": 4.0, "sft.num_steps": 2, "sft.learning_rate": 1e-2,
            "sft.batch_size": 8, "sft.micro_batch_size": 8, "checkpoints.every_steps": 1,
        }
    )  # fmt: skip
    workdir = tmp_path / "run"
    for _ in range(2):
        assert fine_tune(config, str(workdir)) == 0
    before = load_file(f"{config.model.path}/model.safetensors")
    after = load_file(workdir / "model" / "model.safetensors")
    adapter = load_file(workdir / "adapter" / "adapter_model.safetensors")
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name in before if "_proj.weight" in name}
    prefix, name = "base_model.model.", "model.layers.0.mlp.up_proj"
    pair = (adapter[f"{prefix}{name}.lora_{part}.weight"] for part in "BA")
    difference = after[f"{name}.weight"] - before[f"{name}.weight"]
    np.testing.assert_allclose(difference, 2.0 * np.matmul(*pair), atol=1e-6)
    losses = [row["sft/loss"] for row in read_rows(workdir) if "sft/loss" in row]
    assert len(losses) == 2 and losses[1] < losses[0]
