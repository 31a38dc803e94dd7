"""Prompts of a difficulty: all whose last share of correct responses lies in [low, high].

Prompts that were not visited count as if they did. The others have the weight `outside`, by which
they are visited again now and then, as the policy changes.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from semrl_jax.data.curricula import Prompts
from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Options:
    low: float = setting(0.1, "lowest share of correct responses", within="[0, 1]")
    high: float = setting(0.9, "highest share of correct responses", within="[0, 1]")
    outside: float = setting(0.05, "weight of the other prompts", within="[0, 1]")

    def __post_init__(self):
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} must be at most high={self.high:g}.")


def weights(prompts: Prompts, options: Options) -> np.ndarray:
    inside = (prompts.rates >= options.low) & (prompts.rates <= options.high)
    return np.where(inside | (prompts.visits == 0), 1.0, options.outside)
