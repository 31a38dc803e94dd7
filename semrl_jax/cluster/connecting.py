"""Processes that JAX has joined: makes their `Peers`, and sends bytes over the mesh."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from semrl_jax.cluster.links import Listener
from semrl_jax.cluster.peers import Channel, Peers, Processes
from semrl_jax.support.addresses import is_loopback, split_address
from semrl_jax.support.rounding import next_power_of_two

KEY_BYTES = 32
MIN_GATHERED_BYTES = 2**16
MAX_GATHERED_BYTES = 2**28  # of all processes in one collective, which every device holds


def connect(coordinator: str, *, progress: Callable[[str], None], **timeouts_s: float) -> Peers:
    """The peers of a joined process; without connections if it is the only one. See `Peers`.

    Process 0 takes a free port, other than the coordinator's. The others receive secret and port
    over the mesh. With a coordinator on loopback, process 0 listens on loopback only.
    """
    count = jax.process_count()
    if count == 1:
        return Peers()
    host, _ = split_address(coordinator, "distributed.coordinator")
    listener, parts = None, np.zeros(KEY_BYTES + 2, np.uint8)
    if jax.process_index() == 0:
        key = secrets.token_bytes(KEY_BYTES)
        listener = Listener(host if is_loopback(host) else "", key)
        port = listener.address[1]
        parts = np.frombuffer(key + port.to_bytes(2, "big"), np.uint8)
    parts = np.asarray(multihost_utils.broadcast_one_to_all(parts), np.uint8)
    return Peers(
        jax.process_index(),
        count,
        listener=listener,
        address=(host, int.from_bytes(parts[KEY_BYTES:].tobytes(), "big")),
        key=parts[:KEY_BYTES].tobytes(),
        progress=progress,
        **timeouts_s,
    )


def gather_bytes(peers: Processes, phase: str, data: bytes) -> list[bytes]:
    """Returns the data of every process, by process; every process must call it.

    They go over the mesh, or through process 0 for another thread than the main one. The sizes are
    exchanged first, so that a missing process is named before the collective. A few processes may
    have all the data, so it goes in parts: each has room for as much of every process.
    """
    if peers.count == 1:
        return [data]
    if isinstance(peers, Channel):
        return peers.gather_bytes(phase, data)
    sizes = peers.gather(phase, len(data))
    size = min(next_power_of_two(max(sizes)), MAX_GATHERED_BYTES // peers.count)
    size = max(size, MIN_GATHERED_BYTES)
    parts: list[list[bytes]] = [[] for _ in sizes]
    with peers.phase(phase):
        for start in range(0, max(sizes), size):
            own = np.frombuffer(data[start : start + size], np.uint8)
            rows = multihost_utils.process_allgather(np.pad(own, (0, size - len(own))))
            for part, row, length in zip(parts, np.asarray(rows), sizes):
                part.append(row[: max(length - start, 0)].tobytes())
    return [b"".join(part) for part in parts]
