"""Mistral and Mathstral."""

from semrl_jax.models.families import Family

FAMILY = Family(
    "mistral", "MistralForCausalLM", max_position_embeddings=131_072, sliding_window="all"
)
