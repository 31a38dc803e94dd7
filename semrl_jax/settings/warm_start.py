"""Settings of `config.warm_start`."""

from __future__ import annotations

import dataclasses

from semrl_jax.settings.rules import Section, divides
from semrl_jax.support.fields import derived, part_of, setting


@dataclasses.dataclass(frozen=True)
class WarmStart:
    num_steps: int = setting(0, "optimiser steps; 0: none", at_least=0)
    num_demonstrations: int = setting(
        20_000, "demonstrations, generated, and repeated", "sequences", above=0
    )
    batch_size: int = setting(64, "per optimiser step", "sequences", above=0)
    micro_batch_size: int = derived(
        lambda config: part_of(config.warm_start.get_ref("batch_size"), 16),
        "per pass; divides batch_size. Default: 16 if that divides it, else all",
        "sequences",
        above=0,
    )
    learning_rate: float = setting(2e-3, "learning rate", above=0)
    forget_probability: float = setting(0.8, "probability of a dropped carry", within="[0, 1]")


def check(warm_start: Section) -> None:
    size, total = warm_start["micro_batch_size"], warm_start["batch_size"]
    divides("warm_start.micro_batch_size", size, "warm_start.batch_size", total)
