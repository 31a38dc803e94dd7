"""Checks of `config.logging`."""

from __future__ import annotations

from semrl_jax.settings.rules import Section, at_least_zero


def check(logging: Section) -> None:
    at_least_zero("logging", logging, "rollouts_every_steps", "plot_every_steps")
