"""Llama 2 and 3."""

from semrl_jax.models.families import Family

FAMILY = Family(
    "llama", "LlamaForCausalLM", needs_kv_heads=False, must_be_false=("attention_bias",)
)
