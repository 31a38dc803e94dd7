"""Settings of `config.distributed`."""

from __future__ import annotations

import dataclasses

from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Distributed:
    coordinator: str = setting("", "host:port of process 0; empty: from the cluster")
    num_processes: int = setting(0, "0: from the cluster; 1: this process alone", "processes")
    process_id: int = setting(-1, "-1: from the cluster")
    connect_timeout_s: float = setting(300.0, "for all processes to arrive", above=0)
    heartbeat_timeout_s: float = setting(60.0, "after this silence, a process is lost", above=0)
    phase_timeout_s: float = setting(
        10800.0, "for one phase; above rollout.call_timeout_s", above=0
    )
