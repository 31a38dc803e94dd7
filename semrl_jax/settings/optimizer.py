"""Settings of `config.optimizer`."""

from __future__ import annotations

import dataclasses

from semrl_jax.support.choices import DTYPES, SCHEDULES
from semrl_jax.support.fields import section, setting


@dataclasses.dataclass(frozen=True)
class Steps:
    """What the optimiser steps of policy and critic have each for themselves."""

    learning_rate_warmup_steps: int = setting(
        0, "optimiser steps with a linearly rising rate", at_least=0
    )
    learning_rate_schedule: str = setting(
        "constant",
        "after the warm-up: constant, or linear or cosine down to learning_rate_final_fraction",
        choices=SCHEDULES,
    )
    learning_rate_final_fraction: float = setting(
        0.0, "linear, cosine: share of the rate that is left", within="[0, 1]"
    )
    adam_b1: float = setting(0.9, "adamw: decay of the mean of gradients", within="[0, 1)")
    adam_b2: float = setting(
        0.999, "adamw: decay of the mean of squared gradients", within="[0, 1)"
    )
    weight_decay: float = setting(0.01, "times the learning rate, per step", at_least=0)
    max_grad_norm: float = setting(1.0, "larger gradients are scaled down to it", above=0)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    name: str = setting("adamw", 'adamw, adafactor, or "my_package.my_module" (docs/extending.md)')
    options: dict = section(dict, "options without a field below")
    first_moment_dtype: str = setting(
        "float32", "dtype of the mean of gradients: float32 or bfloat16", choices=DTYPES
    )
    momentum: float = setting(0.0, "adafactor: decay of the mean of its steps; 0: none")
    decay_exponent: float = setting(0.8, "adafactor: exponent of the decay of the mean of squares")
