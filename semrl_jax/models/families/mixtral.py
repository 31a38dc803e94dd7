"""Mixtral: Mistral with mixtures of experts."""

from __future__ import annotations

from typing import Any

from semrl_jax.models.families import Family, Fields

# What transformers gives absent fields.
DEFAULTS = {
    "sliding_window": None,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-5,
}


def from_hf(hf: Fields) -> dict[str, Any]:
    """To Qwen3's names. Weights of experts always sum to 1."""
    given = DEFAULTS | dict(hf) | {"norm_topk_prob": True}
    if "intermediate_size" in hf:
        given["moe_intermediate_size"] = hf["intermediate_size"]
    return given


def to_hf(fields: Fields) -> dict[str, Any]:
    """The inverse."""
    hf = dict(fields)
    hf["num_local_experts"] = hf.pop("num_experts")
    hf["intermediate_size"] = hf.pop("moe_intermediate_size")
    for name in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"):
        del hf[name]
    return hf


def of_random(sizes: Fields) -> dict[str, Any]:
    """Eight experts, of which a token uses as many parameters as a dense model has."""
    width = max(sizes["intermediate_size"] // 2, 1)
    experts = {"num_experts": 8, "experts_per_token": 2, "intermediate_size": width}
    return {"intermediate_size": width, "experts": experts | {"normalize_weights": True}}


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    sliding_window="all",
    has_experts=True,
    tensor_names={
        "router": "block_sparse_moe.gate",
        "expert_gate": "block_sparse_moe.experts.{expert}.w1",
        "expert_up": "block_sparse_moe.experts.{expert}.w3",
        "expert_down": "block_sparse_moe.experts.{expert}.w2",
    },
    from_hf=from_hf,
    to_hf=to_hf,
    of_random=of_random,
)
