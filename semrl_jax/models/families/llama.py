"""Llama 2 and 3."""

from semrl_jax.models.families import Family

FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    max_position_embeddings=2048,
    needs_kv_heads=False,
    must_be_false=("attention_bias",),
)
