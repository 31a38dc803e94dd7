"""Checks of `config.shaping`, whose settings are those of `ShapingOptions`."""

from __future__ import annotations

from semrl_jax.settings.rules import Section
from semrl_jax.shaping.options import ShapingOptions
from semrl_jax.support.errors import UserError


def check(shaping: Section) -> None:
    try:
        ShapingOptions(**shaping)
    except ValueError as error:
        raise UserError(str(error)) from None
