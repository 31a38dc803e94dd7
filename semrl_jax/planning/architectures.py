"""Published architectures by hub id: what their `config.json` says, so that a plan needs no files.

Source: the config.json of each repository on huggingface.co, read 2026-11. Fields with the value
that transformers takes by default are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semrl_jax.models import DecoderConfig, config_from_hf, find_directory, load_config
from semrl_jax.support.errors import UserError


def _qwen2(width, inner, layers, heads, kv_heads, vocabulary, tied) -> Mapping[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "hidden_act": "silu",
    }


PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": _qwen2(896, 4864, 24, 14, 2, 151_936, True),
    "Qwen/Qwen2.5-1.5B": _qwen2(1536, 8960, 28, 12, 2, 151_936, True),
    "Qwen/Qwen2.5-7B": _qwen2(3584, 18_944, 28, 28, 4, 152_064, False),
    "Qwen/Qwen2.5-32B": _qwen2(5120, 27_648, 64, 40, 8, 152_064, False),
    "meta-llama/Llama-3.2-3B": {
        "model_type": "llama",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "hidden_act": "silu",
    },
}


def find_architecture(path: str, family: str = "") -> DecoderConfig:
    """The architecture of `model.path`, of a published model without any file; or UserError."""
    fields = PUBLISHED.get(path.removesuffix("-Instruct"))
    if fields is not None:
        return config_from_hf(fields, family)
    try:
        return load_config(find_directory(path), family)
    except UserError as error:
        raise UserError(
            f"model.path={path!r}: {error} Without files, a plan knows {', '.join(PUBLISHED)}."
        ) from None
