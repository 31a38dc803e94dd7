"""Phi 3 and Phi 4 without longrope: Llama whose files fuse the kernels of a layer."""

from __future__ import annotations

from typing import Any

from semrl_jax.models.families import Family, Fields
from semrl_jax.support.errors import UserError

# What transformers gives absent fields.
DEFAULTS = {"sliding_window": None, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def from_hf(hf: Fields) -> dict[str, Any]:
    """Absent fields; rotary embeddings that the class in transformers refuses are refused."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    if kind in ("longrope", "su", "yarn"):
        raise UserError(
            f"rope_type={kind!r} is not supported; choose a model of the short context, as "
            "Phi-3-mini-4k-instruct."
        )
    return DEFAULTS | dict(hf)


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    needs_kv_heads=False,
    sliding_window="all",
    fused={"self_attn.qkv_proj": ("query", "key", "value"), "mlp.gate_up_proj": ("gate", "up")},
    from_hf=from_hf,
)
