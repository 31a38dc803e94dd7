"""Qwen3 with mixtures of experts."""

from __future__ import annotations

from typing import Any

from semrl_jax.models.families import Family, Fields


def of_random(sizes: Fields) -> dict[str, Any]:
    """Eight experts, of which a token uses as many parameters as a dense model has."""
    return {
        "experts": {
            "num_experts": 8,
            "experts_per_token": 2,
            "intermediate_size": max(sizes["intermediate_size"] // 2, 1),
            "normalize_weights": True,
        }
    }


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    query_key_norm=True,
    must_be_false=("attention_bias", "use_sliding_window"),
    has_experts=True,
    of_random=of_random,
)
