"""Checks of `config.rewards`; `VerifierPool` calls them too."""

from __future__ import annotations

from semrl_jax.errors import UserError
from semrl_jax.modules import module_names
from semrl_jax.settings.rules import Section, above_zero, at_least_zero, at_most, one_of

VERIFIERS = "semrl_jax.rewards.verifiers"
MODES = ("independent", "mix")
MAX_SCORE = 3.4e38  # rewards are float32


def check(rewards: Section) -> None:
    above_zero("rewards", rewards, "timeout_s", "num_workers")
    at_most("rewards.timeout_s", rewards["timeout_s"], 2**31)
    at_most("rewards.num_workers", rewards["num_workers"], 1024)
    at_least_zero("rewards", rewards, "memory_limit_gib")
    at_most("rewards.memory_limit_gib", rewards["memory_limit_gib"], 2**20)
    one_of("rewards.mode", rewards["mode"], MODES)
    for field in ("unboxed_penalty", "failure_score"):
        if not abs(rewards[field]) <= MAX_SCORE:  # NaN is not
            raise UserError(f"rewards.{field}={rewards[field]} must be a finite float32 number.")
    function = rewards["function"]
    module, _, name = function.partition(":")
    is_users = module.strip() and name.strip()
    if not is_users and function not in ("", *module_names(VERIFIERS)):
        raise UserError(
            f"rewards.function={function!r} must be 'package.module:name', with the module's name "
            f"as Python imports it, or a built-in verifier: {', '.join(module_names(VERIFIERS))}."
        )
