"""Several processes as one job: which process this is, and how the processes connect."""

from semrl_jax.cluster.discovery import SINGLE, Place, find_place
from semrl_jax.cluster.joining import exit_without_peers, join

__all__ = ["SINGLE", "Place", "exit_without_peers", "find_place", "join"]
