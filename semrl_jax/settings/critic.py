"""Settings of `config.critic`."""

from __future__ import annotations

import dataclasses

from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Critic:
    """`config.critic`."""

    path: str = setting("", "Hugging Face directory; empty: the policy's weights and a new head")
    warmup_steps: int = setting(0, "Steps at the beginning that train only the critic", at_least=0)
    learning_rate: float = setting(1e-5, "learning rate of the critic", above=0)
    learning_rate_warmup_steps: int = setting(
        0, "optimiser steps with a linearly rising rate", at_least=0
    )
    adam_b1: float = setting(0.9, "adamw: decay of the mean of gradients", within="[0, 1)")
    adam_b2: float = setting(
        0.999, "adamw: decay of the mean of squared gradients", within="[0, 1)"
    )
    weight_decay: float = setting(0.01, "times the learning rate, per step", at_least=0)
    max_grad_norm: float = setting(1.0, "gradients above this norm are scaled down to it", above=0)
