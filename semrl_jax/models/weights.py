"""Between our stacked nested dict and Hugging Face tensors, one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import ml_dtypes
import numpy as np

from semrl_jax.models.config import DecoderConfig
from semrl_jax.models.policy import Params
from semrl_jax.types import TensorSpec

# Ours (below "layers") -> Hugging Face (below "model.layers.<i>."); kernels are transposed.
LAYER_NAMES = {
    ("attention_norm", "scale"): "input_layernorm.weight",
    ("query", "kernel"): "self_attn.q_proj.weight",
    ("query", "bias"): "self_attn.q_proj.bias",
    ("key", "kernel"): "self_attn.k_proj.weight",
    ("key", "bias"): "self_attn.k_proj.bias",
    ("value", "kernel"): "self_attn.v_proj.weight",
    ("value", "bias"): "self_attn.v_proj.bias",
    ("output", "kernel"): "self_attn.o_proj.weight",
    ("mlp_norm", "scale"): "post_attention_layernorm.weight",
    ("gate", "kernel"): "mlp.gate_proj.weight",
    ("up", "kernel"): "mlp.up_proj.weight",
    ("down", "kernel"): "mlp.down_proj.weight",
}


def numpy_dtype(name: str) -> np.dtype:
    """NumPy dtype by name, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def tensor_specs(config: DecoderConfig, dtype: str) -> list[TensorSpec]:
    """Every tensor in streaming order: embedding, layers, final norm, output matrix."""
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    kv_heads, inner = config.num_kv_heads * config.head_dim, config.intermediate_size
    shapes = {
        "attention_norm": (width,), "query": (heads, width), "key": (kv_heads, width),
        "value": (kv_heads, width), "output": (width, heads), "mlp_norm": (width,),
        "gate": (inner, width), "up": (inner, width), "down": (width, inner),
    }  # fmt: skip
    specs = [TensorSpec("model.embed_tokens.weight", (config.vocab_size, width), dtype)]
    for layer in range(config.num_layers):
        for (module, kind), name in _layer_names(config).items():
            shape = shapes[module][:1] if kind == "bias" else shapes[module]
            specs.append(TensorSpec(f"model.layers.{layer}.{name}", shape, dtype))
    specs.append(TensorSpec("model.norm.weight", (width,), dtype))
    if not config.tie_embeddings:
        specs.append(TensorSpec("lm_head.weight", (config.vocab_size, width), dtype))
    return specs


def iterate_hf_tensors(
    params: Params, config: DecoderConfig, dtype: str
) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """Yields (spec, array) in the order of `tensor_specs`; one layer on the host at a time."""
    specs = iter(tensor_specs(config, dtype))
    target = numpy_dtype(dtype)

    def emit(array, transpose=False):
        host = np.asarray(array).T if transpose else np.asarray(array)
        return next(specs), np.ascontiguousarray(host, dtype=target)

    yield emit(params["embed"]["embedding"])
    for layer in range(config.num_layers):
        # One transfer a layer: the whole stack never sits on the host.
        arrays = jax.device_get(
            {key: params["layers"][key[0]][key[1]][layer] for key in _layer_names(config)}
        )
        for key in _layer_names(config):
            yield emit(arrays[key], transpose=key[1] == "kernel")
    yield emit(params["final_norm"]["scale"])
    if not config.tie_embeddings:
        yield emit(params["head"]["kernel"], transpose=True)


def params_from_hf(tensors: Mapping[str, np.ndarray], config: DecoderConfig) -> Params:
    """Float32 host parameters from Hugging Face tensors; names and shapes are the caller's duty."""

    def take(name, transpose=False):
        array = np.asarray(tensors[name], np.float32)
        return np.ascontiguousarray(array.T) if transpose else array

    layers: Params = {}
    for (module, kind), name in _layer_names(config).items():
        stacked = np.stack(
            [
                take(f"model.layers.{layer}.{name}", transpose=kind == "kernel")
                for layer in range(config.num_layers)
            ]
        )
        layers.setdefault(module, {})[kind] = stacked
    params: Params = {
        "embed": {"embedding": take("model.embed_tokens.weight")},
        "layers": layers,
        "final_norm": {"scale": take("model.norm.weight")},
    }
    if not config.tie_embeddings:
        params["head"] = {"kernel": take("lm_head.weight", transpose=True)}
    return params


def _layer_names(config: DecoderConfig) -> dict[tuple[str, str], str]:
    return {
        key: name for key, name in LAYER_NAMES.items() if key[1] != "bias" or config.attention_bias
    }
