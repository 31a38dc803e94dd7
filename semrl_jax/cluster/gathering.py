"""Gathers bytes from all processes in all processes, over the mesh."""

from __future__ import annotations

import numpy as np
from jax.experimental import multihost_utils

from semrl_jax.cluster.peers import Peers
from semrl_jax.rounding import next_power_of_two

MIN_BYTES = 2**16


def gather_bytes(peers: Peers, phase: str, data: bytes) -> list[bytes]:
    """Returns the data of every process, by process; every process must call it.

    The sizes are exchanged first, so that a missing process is named before the collective.
    """
    if peers.count == 1:
        return [data]
    sizes = peers.gather(phase, len(data))
    padded = np.zeros(max(next_power_of_two(max(sizes)), MIN_BYTES), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    with peers.phase(phase):
        rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:length].tobytes() for row, length in zip(rows, sizes)]
