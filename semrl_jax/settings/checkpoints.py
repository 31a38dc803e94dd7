"""Checks of `config.checkpoints`."""

from __future__ import annotations

from semrl_jax.settings.rules import Section, above_zero, at_least_zero, items_are
from semrl_jax.support.errors import UserError


def check(checkpoints: Section) -> None:
    above_zero("checkpoints", checkpoints, "every_steps", "keep")
    at_least_zero("checkpoints", checkpoints, "keep_every")
    items_are(int, "checkpoints", checkpoints, "extra_steps")
    for step in checkpoints["extra_steps"]:
        if step < 1:
            raise UserError(f"checkpoints.extra_steps has {step}; steps count from 1.")
