"""Checks of `config.rewards`, for a config and for a `VerifierPool` that is made by hand."""

from __future__ import annotations

from semrl_jax.errors import UserError
from semrl_jax.settings.rules import Section, above_zero, at_least_zero, at_most, one_of

MODES = ("independent", "mix")
MAX_SCORE = 3.4e38  # rewards are float32


def check(rewards: Section) -> None:
    """Raises UserError for the first wrong field."""
    above_zero("rewards", rewards, "timeout_s", "num_workers")
    at_most("rewards.timeout_s", rewards["timeout_s"], 2**31)
    at_most("rewards.num_workers", rewards["num_workers"], 1024)
    at_least_zero("rewards", rewards, "memory_limit_gib")
    at_most("rewards.memory_limit_gib", rewards["memory_limit_gib"], 2**20)
    one_of("rewards.mode", rewards["mode"], MODES)
    for field in ("unboxed_penalty", "failure_score"):
        if not abs(rewards[field]) <= MAX_SCORE:  # NaN is not
            raise UserError(f"rewards.{field}={rewards[field]} must be a finite float32 number.")
    module, _, name = rewards["function"].partition(":")
    if rewards["function"] and not (module.strip() and name.strip()):
        raise UserError(
            f"rewards.function={rewards['function']!r} must be 'package.module:name', with the "
            "module's name as Python imports it."
        )
