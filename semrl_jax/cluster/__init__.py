"""Several processes as one job: which one this is, and how they come together."""

from semrl_jax.cluster.environment import SINGLE, Place, expand_nodes, find_place
from semrl_jax.cluster.joining import exit_without_peers, join

__all__ = ["SINGLE", "Place", "exit_without_peers", "expand_nodes", "find_place", "join"]
