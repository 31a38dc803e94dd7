"""Environments: what the policy talks to, turn by turn, in processes of their own.

An environment is a class, of a module of `kinds` or the user's; `interface` says what it has to be.
This room loads neither JAX nor a tokenizer.
"""

from semrl_jax.environments.interface import Message, Turn

__all__ = ["Message", "Turn"]
