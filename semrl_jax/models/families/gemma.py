"""Gemma (the first one; 2B and 7B)."""

from __future__ import annotations

from typing import Any

from semrl_jax.models.families import Family, Fields

DEFAULTS = {"tie_word_embeddings": True, "max_position_embeddings": 8192}  # of transformers


def from_hf(hf: Fields) -> dict[str, Any]:
    """Published files name the activation "gelu", which means its approximation by tanh."""
    given = hf.get("hidden_act", FAMILY.activation)
    activation = FAMILY.activation if given in ("gelu", None) else given
    return DEFAULTS | dict(hf) | {"hidden_act": activation}


FAMILY = Family(
    "gemma",
    "GemmaForCausalLM",
    head_dim=256,
    must_be_false=("attention_bias", "use_bidirectional_attention"),
    activation="gelu_pytorch_tanh",
    offset_norms=True,
    scaled_embedding=True,
    from_hf=from_hf,
)
