"""Checks of `config.training`."""

from __future__ import annotations

from semrl_jax.errors import UserError
from semrl_jax.settings.rules import Section, above_zero, at_least_zero


def check(training: Section) -> None:
    above_zero(
        "training", training,
        "prompts_per_minibatch", "micro_batch_size", "learning_rate", "max_grad_norm",
        "max_skipped_updates", "grace_s",
    )  # fmt: skip
    at_least_zero(
        "training", training,
        "num_steps", "weight_decay", "learning_rate_warmup_steps", "micro_batch_tokens",
    )  # fmt: skip
    for field in ("adam_b1", "adam_b2"):
        if not 0 <= training[field] < 1:
            raise UserError(f"training.{field}={training[field]} must be in [0, 1).")
