"""Qwen2 and Qwen2.5."""

from semrl_jax.models.families import Family

FAMILY = Family("qwen2", "Qwen2ForCausalLM", attention_bias=True, sliding_window="some")
