"""Replay of hard successes: prompts solved at most `rate` of the time, but solved, count more."""

from __future__ import annotations

import dataclasses

import numpy as np

from semrl_jax.data.curricula import Prompts
from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Options:
    rate: float = setting(0.25, "highest share of correct responses", within="[0, 1]")
    boost: float = setting(4.0, "weight of these prompts; of the others 1", within="[1, 1e6]")


def weights(prompts: Prompts, options: Options) -> np.ndarray:
    return np.where((prompts.rates > 0) & (prompts.rates <= options.rate), options.boost, 1.0)
