"""Gemma 2 (2B, 9B and 27B): Gemma 3 with caps of scores and logits, without norms of heads."""

from __future__ import annotations

import dataclasses
from typing import Any

from semrl_jax.models.families import Fields
from semrl_jax.models.families.gemma3_text import FAMILY as GEMMA3
from semrl_jax.models.families.gemma3_text import LOCAL, WHOLE, renamed, whole_number
from semrl_jax.support.errors import UserError

# What transformers gives absent fields.
DEFAULTS = {
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def from_hf(hf: Fields) -> dict[str, Any]:
    """To Llama's names. Without `layer_types`, every second layer attends to all tokens."""
    fields = DEFAULTS | dict(hf)
    whole_number(fields, "query_pre_attn_scalar")
    fields["hidden_act"] = hf.get("hidden_activation", FAMILY.activation)
    count = hf.get("num_hidden_layers")
    if hf.get("layer_types") is None and type(count) is int and 0 < count < 2**12:
        fields["layer_types"] = [WHOLE if layer % 2 else LOCAL for layer in range(count)]
    kinds = fields.get("layer_types")
    if fields["sliding_window"] is None and isinstance(kinds, list) and LOCAL in kinds:
        raise UserError(f"sliding_window=null does not fit the layers of kind {LOCAL}.")
    return fields | {"use_sliding_window": True}


def of_random(sizes: Fields) -> dict[str, Any]:
    return {
        "sliding_window": 32,
        "full_attention_layers": tuple(range(1, sizes["num_layers"], 2)),
        "query_pre_attn_scalar": float(sizes["head_dim"]),
        "final_logit_softcap": 30.0,
        "attention_logit_softcap": 50.0,
    }


FAMILY = dataclasses.replace(
    GEMMA3,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    query_key_norm=False,
    options=("query_pre_attn_scalar", "final_logit_softcap", "attention_logit_softcap"),
    from_hf=from_hf,
    to_hf=renamed,
    of_random=of_random,
)
