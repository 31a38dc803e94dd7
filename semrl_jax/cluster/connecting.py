"""Makes `Peers` from processes that JAX has joined."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from semrl_jax.cluster.environment import split_address
from semrl_jax.cluster.links import is_loopback, listen
from semrl_jax.cluster.peers import Peers

KEY_BYTES = 32


def connect(
    coordinator: str,
    *,
    connect_timeout_s: float,
    heartbeat_timeout_s: float,
    phase_timeout_s: float,
    progress: Callable[[str], None],
) -> Peers:
    """The peers of a joined process; without connections if it is the only process.

    Process 0 takes a free port, other than the coordinator's. The others receive secret and port
    over the mesh. With a coordinator on loopback, process 0 listens on loopback only.

    Raises:
      UserError: if a process cannot connect to process 0 within `connect_timeout_s`.
    """
    count = jax.process_count()
    if count == 1:
        return Peers()
    host, _ = split_address(coordinator, "distributed.coordinator")
    listener, parts = None, np.zeros(KEY_BYTES + 2, np.uint8)
    if jax.process_index() == 0:
        key = secrets.token_bytes(KEY_BYTES)
        listener = listen(host if is_loopback(host) else "", key)
        port = listener.address[1]
        parts = np.frombuffer(key + port.to_bytes(2, "big"), np.uint8)
    parts = np.asarray(multihost_utils.broadcast_one_to_all(parts), np.uint8)
    return Peers(
        jax.process_index(),
        count,
        listener=listener,
        address=(host, int.from_bytes(parts[KEY_BYTES:].tobytes(), "big")),
        key=parts[:KEY_BYTES].tobytes(),
        connect_timeout_s=connect_timeout_s,
        heartbeat_timeout_s=heartbeat_timeout_s,
        phase_timeout_s=phase_timeout_s,
        progress=progress,
    )
