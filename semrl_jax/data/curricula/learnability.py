"""Prompts that the policy solves now and then: weight p (1 - p), p the last share of correct ones.

It is the variance of a reward of 0 or 1, so the size of the signal that a group can give. A prompt
that was not visited has p = 1/2. `floor` is the least weight, so that no prompt is lost.

Source: arXiv:2502.12272. There, a batch is chosen from a larger sample by this score.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from semrl_jax.data.curricula import Prompts
from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Options:
    floor: float = setting(0.02, "least weight; the largest is 1/4", within="[0, 0.25]")


def weights(prompts: Prompts, options: Options) -> np.ndarray:
    p = np.where(prompts.visits > 0, prompts.rates.astype(np.float64), 0.5)
    return np.maximum(p * (1 - p), options.floor)
