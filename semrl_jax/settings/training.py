"""Checks of `config.training`."""

from __future__ import annotations

from semrl_jax.settings.rules import Section, above_zero, at_least_zero, one_of, optimizer
from semrl_jax.support.choices import DTYPES, OFFLOADED


def check(training: Section) -> None:
    optimizer("training", training)
    above_zero(
        "training", training,
        "prompts_per_minibatch", "micro_batch_size", "max_skipped_updates", "grace_s",
    )  # fmt: skip
    one_of("training.export", training["export"], ("", *DTYPES))
    for part in training["offload"]:
        one_of("training.offload", part, OFFLOADED)
    at_least_zero("training", training, "num_steps", "micro_batch_tokens")
