"""Settings of `config.optimizer`."""

from __future__ import annotations

import dataclasses

from semrl_jax.support.choices import DTYPES
from semrl_jax.support.fields import section, setting


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """`config.optimizer`."""

    name: str = setting(
        "adamw",
        'adamw or adafactor, or "my_package.my_module" with one of your own, docs/extending.md',
    )
    options: dict = section(dict, "options without a field below")
    first_moment_dtype: str = setting(
        "float32",
        "adamw, adafactor: dtype of the mean of gradients: float32 or bfloat16",
        choices=DTYPES,
    )
    momentum: float = setting(0.0, "adafactor: decay of the mean of its steps; 0: none")
    decay_exponent: float = setting(0.8, "adafactor: of the decay of the mean of squares")
