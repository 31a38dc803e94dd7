"""Checks of `config.shaping`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semrl_jax.errors import UserError
from semrl_jax.shaping.options import ShapingOptions


def check(shaping: Mapping[str, Any]) -> None:
    """Raises UserError for the first wrong field."""
    try:
        ShapingOptions(**shaping)
    except ValueError as error:
        raise UserError(str(error)) from None
