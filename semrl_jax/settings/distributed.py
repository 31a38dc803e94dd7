"""Checks of `config.distributed`; `cluster.environment` checks what it joins to a cluster."""

from __future__ import annotations

from semrl_jax.settings.rules import Section, above_zero


def check(distributed: Section) -> None:
    above_zero(
        "distributed", distributed, "connect_timeout_s", "heartbeat_timeout_s", "phase_timeout_s"
    )
