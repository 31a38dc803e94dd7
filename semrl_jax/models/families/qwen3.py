"""Qwen3, without mixtures of experts."""

from semrl_jax.models.families import Family

FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    query_key_norm=True,
    head_dim=128,
    must_be_false=("attention_bias",),
    sliding_window="some",
)
