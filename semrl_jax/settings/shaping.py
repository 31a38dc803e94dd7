"""Checks of `config.shaping`."""

from __future__ import annotations

from semrl_jax.errors import UserError
from semrl_jax.settings.rules import Section
from semrl_jax.shaping.options import ShapingOptions


def check(shaping: Section) -> None:
    try:
        ShapingOptions(**shaping)
    except ValueError as error:
        raise UserError(str(error)) from None
