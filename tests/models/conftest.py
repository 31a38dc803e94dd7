"""Small random models in transformers and here."""

import dataclasses
import os
import pathlib
import re
import typing

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from semrl_jax import models


@dataclasses.dataclass
class Pair:
    """The same random weights in transformers and in ours."""

    torch_model: typing.Any
    policy: models.Policy
    params: dict
    directory: pathlib.Path


# Each with what sets it apart: windows and original contexts are far below the tests' sequences,
# head widths are not hidden_size / num_attention_heads.
LLAMA3_ROPE = {  # wavelengths of 6 to 2000 tokens: kept, blended and divided ones
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 8}
MOE = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {
    "head_dim": 32, "sliding_window": 8, "layer_types": KINDS, "query_pre_attn_scalar": 20,
    "final_logit_softcapping": 7.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 9e3, "factor": 3.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}  # fmt: skip
FAMILIES = {
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2-window": (transformers.Qwen2Config, SLIDING | {"max_window_layers": 1}),
    "llama": (transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": (transformers.LlamaConfig, {"rope_parameters": LINEAR_ROPE, "head_dim": 32}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 8, "head_dim": 32}),
    "mistral-whole": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 32}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "qwen3-moe": (transformers.Qwen3MoeConfig, MOE | {"norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        transformers.Qwen3MoeConfig,
        MOE | {"num_experts": 3, "decoder_sparse_step": 2, "mlp_only_layers": [0]},
    ),
    "gemma3": (transformers.Gemma3TextConfig, GEMMA),
    "gemma": (transformers.GemmaConfig, {"head_dim": 32}),
    # The caps are near the sizes of these models' scores and logits.
    "gemma2": (
        transformers.Gemma2Config,
        {
            "head_dim": 32,
            "sliding_window": 8,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 7.0,
        },
    ),
    "phi3": (transformers.Phi3Config, {"sliding_window": 8}),
    "mixtral": (
        transformers.MixtralConfig,
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "qwen3-window": (transformers.Qwen3Config, SLIDING | {"head_dim": 32, "layer_types": KINDS}),
}


def make_pair(directory, family="qwen2", **overrides) -> Pair:
    """Saves a random float32 model by transformers and loads it by ours."""
    sizes = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "pad_token_id": 0, "eos_token_id": 1, "rope_theta": 10_000.0,
    }  # fmt: skip
    config_class, options = FAMILIES[family]
    config = config_class(**(sizes | options | overrides))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms off their neutral values
            parameter.normal_(mean=0.0 if parameter.dim() > 1 else 0.6, std=0.2)
    model.save_pretrained(directory)
    architecture = models.load_config(directory)
    params = jax.device_put(models.load_params(directory, architecture))
    return Pair(model, models.Policy(architecture), params, directory)


@pytest.fixture(scope="session", params=["tied", "untied"])
def pair(request, tmp_path_factory) -> Pair:
    directory = tmp_path_factory.mktemp(request.param)
    return make_pair(directory, tie_word_embeddings=request.param == "tied")


def by_file_name(arrays):
    """Arrays under our file names: transformers holds a layer's experts, and fused kernels, as one.

    The models of Phi 3 have 2 key-value heads for 4 query heads.
    """
    found = {}
    for name, array in arrays.items():
        stem, _, last = name.rpartition(".")
        if "qkv_proj" in stem:
            ends = len(array) // 2, len(array) * 3 // 4
            for part, rows in zip("qkv", np.split(array, ends)):
                found[name.replace("qkv", part)] = rows
            continue
        if "gate_up_proj" in stem:
            for part, rows in zip(("gate", "up"), np.split(array, 2)):
                found[name.replace("gate_up", part)] = rows
            continue
        parts = {
            "gate_up_proj": lambda a: zip(("gate_proj", "up_proj"), np.split(a, 2, axis=1)),
            "down_proj": lambda a: [("down_proj", a)],
        }.get(last)
        if parts is None:
            found[name] = array
            continue
        for part, kernels in parts(array):
            for expert, kernel in enumerate(kernels):
                found[f"{stem}.{expert}.{part}.weight"] = kernel
    return found | {_in_mixtral(name): array for name, array in found.items()}


def _in_mixtral(name):
    for theirs, ours in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        name = re.sub(rf"(experts\.\d+\.){ours}", rf"\1{theirs}", name)
    return name.replace(".mlp.", ".block_sparse_moe.")


@dataclasses.dataclass
class Padded:
    """Ragged sequences in one padded array; `valid` marks tokens."""

    token_ids: jax.Array
    positions: jax.Array
    segment_ids: jax.Array

    @property
    def valid(self) -> np.ndarray:
        return np.asarray(self.segment_ids) > 0

    def torch_arguments(self) -> dict[str, torch.Tensor]:
        """What the transformers model takes."""
        return {
            "input_ids": torch.tensor(np.asarray(self.token_ids)),
            "attention_mask": torch.tensor(np.asarray(self.segment_ids)),
            "position_ids": torch.tensor(np.asarray(self.positions)),
        }


def padded_rows(token_ids, tokens) -> Padded:
    """Rows whose tokens are in the columns from the first to before the last of each pair."""
    segment_ids, positions = np.zeros_like(token_ids), np.zeros_like(token_ids)
    for row, (start, end) in enumerate(tokens):
        segment_ids[row, start:end] = 1
        positions[row, start:end] = np.arange(end - start)
    return Padded(jnp.asarray(token_ids), jnp.asarray(positions), jnp.asarray(segment_ids))


@pytest.fixture
def padded() -> Padded:
    """Rows of [left padding | tokens | right padding]."""
    random = np.random.default_rng(0)
    token_ids = random.integers(2, 97, (4, 24)).astype(np.int32)
    return padded_rows(token_ids, [(0, 24), (5, 24), (0, 9), (7, 16)])
