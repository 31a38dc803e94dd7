"""The trainer's side of the wire. Loads neither JAX nor torch."""

from semrl_jax.rollout.client.child import ChildReplica
from semrl_jax.rollout.client.client import RolloutClient

__all__ = ["ChildReplica", "RolloutClient"]
