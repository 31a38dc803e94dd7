"""Hugging Face directories: what we write transformers reads, and the other way round."""

import json

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from semrl_jax import data, models
from semrl_jax.errors import UserError


@pytest.mark.parametrize("tied", [True, False])
def test_saved_directory_loads_in_transformers_with_the_same_logits(tmp_path, tied):
    tokenizer = data.character_tokenizer()
    config = models.DecoderConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        tie_embeddings=tied,
    )
    policy = models.Policy(config)
    params = policy.init(jax.random.key(0))
    models.save_directory(tmp_path / "model", params, config, tokenizer)
    assert models.load_config(tmp_path / "model") == config
    loaded = models.load_params(tmp_path / "model", config)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    )
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model").eos_token_id == (
        model.config.eos_token_id
    )
    ids = np.arange(10, dtype=np.int32)[None]
    states = jax.jit(policy.final_states)(params, ids, ids, np.ones_like(ids))
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits[0].numpy()
    # Float32 sums in another order.
    np.testing.assert_allclose(policy.logits(params, states[0]), expected, rtol=1e-4, atol=1e-5)


def test_streamed_names_are_those_of_transformers(pair):
    ours = {spec.name: spec.shape for spec in models.tensor_specs(pair.policy.config, "float32")}
    theirs = {
        name: tuple(tensor.shape)
        for name, tensor in pair.torch_model.state_dict().items()
        if not (name == "lm_head.weight" and pair.policy.config.tie_embeddings)
    }
    assert ours == theirs
    for spec, array in models.iterate_hf_tensors(pair.params, pair.policy.config, "float32"):
        np.testing.assert_array_equal(array, pair.torch_model.state_dict()[spec.name].numpy())
        assert array.nbytes == spec.num_bytes


def test_shards_and_formats_that_cannot_be_read_are_named(pair, tmp_path):
    config = pair.policy.config
    with pytest.raises(UserError, match=r"config\.json is missing"):
        models.load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        models.load_config(tmp_path)
    with pytest.raises(UserError, match=r"model.safetensors is missing"):
        models.load_params(tmp_path, config)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="cannot be read"):
        models.load_params(tmp_path, config)
    tensors = load_file(f"{pair.directory}/model.safetensors")
    for change, message in (
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update(extra=np.zeros(2)), "extra is not part of the model"),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(3, np.float32)}),
            r"model.norm.weight has shape \(3,\), not \(64,\)",
        ),
    ):
        changed = dict(tensors)
        change(changed)
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=message):
            models.load_params(tmp_path, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not supported"),
        ({"vocab_size": None}, "field 'vocab_size' is missing"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
        ({"layer_types": ["chunked_attention"] * 3}, r"layer_types must name .* not \["),
        ({"num_key_value_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
    ],
)
def test_unsupported_architectures_are_refused(pair, tmp_path, change, message):
    config = json.loads((pair.directory / "config.json").read_text()) | change
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        models.load_config(tmp_path)
