"""Gemma 3, the text models (270M, 1B, and the text part of the larger ones)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semrl_jax.models.families import Family, Fields
from semrl_jax.support.errors import UserError

# What transformers gives absent fields.
DEFAULTS = {
    "tie_word_embeddings": True,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,  # every sixth layer attends to all tokens
}
THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
LOCAL, WHOLE = "sliding_attention", "full_attention"


def from_hf(hf: Fields) -> dict[str, Any]:
    """To Llama's names. Older files have flat rotary fields, and a pattern in place of kinds."""
    fields = DEFAULTS | dict(hf)
    if hf.get("attn_logit_softcapping") is not None:
        raise UserError("attn_logit_softcapping is not supported; only null is.")
    whole_number(fields, "query_pre_attn_scalar")
    fields["hidden_act"] = hf.get("hidden_activation", FAMILY.activation)
    if hf.get("layer_types") is None:
        fields["layer_types"] = _kinds(hf.get("num_hidden_layers"), fields)
    kinds = fields["layer_types"]
    if fields["sliding_window"] is None and isinstance(kinds, list) and LOCAL in kinds:
        raise UserError(f"sliding_window=null does not fit the layers of kind {LOCAL}.")
    nested = _object(hf, "rope_parameters")
    whole, local = (_object(nested, kind) for kind in (WHOLE, LOCAL))
    if (kind := local.get("rope_type", "default")) != "default":
        raise UserError(f"rope_type={kind!r:.100} of {LOCAL} is not supported, only 'default'.")
    whole = {**whole, **_object(hf, "rope_scaling")}
    theta, local_theta = (
        next(found for found in (rope.get("rope_theta"), hf.get(name), base) if found is not None)
        for rope, name, base in (
            (whole, "rope_theta", THETA), (local, "rope_local_base_freq", LOCAL_THETA),
        )
    )  # fmt: skip
    return fields | {
        "rope_parameters": whole | {"rope_theta": theta},
        "rope_scaling": None,
        "rope_local_base_freq": local_theta,
        "use_sliding_window": True,
    }


def _kinds(num_layers: Any, fields: Fields) -> list[str] | None:
    """The kind of each layer by the pattern; None if the number of layers is a mistake."""
    pattern = whole_number(fields, "sliding_window_pattern")
    if type(num_layers) is not int or not 0 < num_layers < 2**12:
        return None  # refused with the other sizes
    return [LOCAL if layer % pattern else WHOLE for layer in range(1, num_layers + 1)]


def whole_number(fields: Fields, name: str) -> int:
    if type(fields[name]) is not int or fields[name] < 1:
        raise UserError(f"{name}={fields[name]!r:.100} must be a whole number above 0.")
    return fields[name]


def _object(fields: Fields, name: str) -> Fields:
    """A field that is an object; {} if it is null or absent."""
    value = fields.get(name)
    if not isinstance(value, Mapping | None):
        raise UserError(f"{name}={value!r:.100} must be an object, or null.")
    return value or {}


def to_hf(fields: Fields) -> dict[str, Any]:
    """The inverse; flat rotary fields stay for older readers."""
    hf = dict(fields)
    local = hf.get("rope_local_base_freq")
    hf["rope_local_base_freq"] = LOCAL_THETA if local is None else local
    hf["rope_parameters"] = {
        WHOLE: hf["rope_parameters"],
        LOCAL: {"rope_type": "default", "rope_theta": hf["rope_local_base_freq"]},
    }
    return renamed(hf)


def renamed(fields: Fields) -> dict[str, Any]:
    """Fields by their names in transformers, as Gemma 2 has them too."""
    ours = "hidden_act", "use_sliding_window", "max_window_layers", "sliding_window_pattern"
    hf = {name: value for name, value in fields.items() if name not in ours}
    scalar = int(fields["query_pre_attn_scalar"])  # transformers refuses a float
    return hf | {"query_pre_attn_scalar": scalar, "hidden_activation": fields["hidden_act"]}


def of_random(sizes: Fields) -> dict[str, Any]:
    """Every third layer attends to all tokens, so that a small model has both kinds."""
    return {
        "sliding_window": 32,
        "full_attention_layers": tuple(range(2, sizes["num_layers"], 3)),
        "rope_theta": THETA,
        "local_rope_theta": LOCAL_THETA,
        "query_pre_attn_scalar": float(sizes["head_dim"]),
    }


FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    query_key_norm=True,
    head_dim=256,
    must_be_false=("attention_bias", "use_bidirectional_attention"),
    sliding_window="some",
    activation="gelu_pytorch_tanh",
    offset_norms=True,
    post_norms=True,
    scaled_embedding=True,
    options=("local_rope_theta", "query_pre_attn_scalar", "final_logit_softcap"),
    tensor_names={
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    from_hf=from_hf,
    to_hf=to_hf,
    of_random=of_random,
)
