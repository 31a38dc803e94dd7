"""Checks of `config.critic`."""

from __future__ import annotations

from semrl_jax.settings.rules import Section, at_least_zero, optimizer


def check(critic: Section) -> None:
    optimizer("critic", critic)
    at_least_zero("critic", critic, "warmup_steps")
