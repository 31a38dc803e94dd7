"""Checks of `config.warm_start`."""

from __future__ import annotations

from semrl_jax.settings.rules import Section, above_zero, at_least_zero, divides
from semrl_jax.support.errors import UserError


def check(warm_start: Section) -> None:
    above_zero(
        "warm_start", warm_start,
        "batch_size", "micro_batch_size", "learning_rate", "num_demonstrations",
    )  # fmt: skip
    at_least_zero("warm_start", warm_start, "num_steps")
    size, total = warm_start["micro_batch_size"], warm_start["batch_size"]
    divides("warm_start.micro_batch_size", size, "warm_start.batch_size", total)
    if not 0 <= warm_start["forget_probability"] <= 1:
        raise UserError(
            f"warm_start.forget_probability={warm_start['forget_probability']} must be in [0, 1]."
        )
