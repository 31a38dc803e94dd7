"""Mistral and Mathstral."""

from semrl_jax.models.families import Family

FAMILY = Family("mistral", "MistralForCausalLM", sliding_window="all")
