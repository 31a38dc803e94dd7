"""Checks of `config.logging`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semrl_jax.settings.rules import at_least_zero


def check(logging: Mapping[str, Any]) -> None:
    """Raises UserError for the first wrong field."""
    at_least_zero("logging", logging, "rollouts_every_steps", "plot_every_steps")
