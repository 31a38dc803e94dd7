"""Checks of `config.training`."""

from __future__ import annotations

from semrl_jax.settings.rules import Section, above_zero, at_least_zero, optimizer


def check(training: Section) -> None:
    optimizer("training", training)
    above_zero(
        "training", training,
        "prompts_per_minibatch", "micro_batch_size", "max_skipped_updates", "grace_s",
    )  # fmt: skip
    at_least_zero("training", training, "num_steps", "micro_batch_tokens")
