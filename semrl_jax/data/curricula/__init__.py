"""Curricula: which prompts a step trains on, by the share of correct responses to each so far.

A curriculum is a module with these names:

- `Options`: a frozen dataclass of settings, which an entry sets: `NAME:option=value:option=value`.
- `weights(prompts, options)`: how much each prompt counts in a draw, float64 [N], at least 0; pure.
  Prompts of weight 0 are drawn only if the others are fewer than a step needs.

A draw depends on these weights, the seed and the number of prompts drawn before, so a resumed run
draws the same prompts. Prompts are drawn without replacement within a round of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from semrl_jax.support.modules import module_with_options, running

FIELD = "data.curriculum"
PARTS = ("Options", "weights")
_DRAWS = 0x0DE5  # third number of the seed; 0x0DE4 is of the order of an epoch


class PromptHistory(NamedTuple):
    """What a run has seen of its N prompts, in its checkpoints."""

    rates: Float[np.ndarray, " N"]  # float32 share of correct responses at the last visit, or 0.0
    visits: Int[np.ndarray, " N"]  # int32 groups of responses so far

    @classmethod
    def nothing(cls, num_prompts: int) -> PromptHistory:
        return cls(np.zeros(num_prompts, np.float32), np.zeros(num_prompts, np.int32))

    def after(self, rows: Sequence[int], correct: Bool[np.ndarray, "P G"]) -> PromptHistory:
        """With the responses to these prompts."""
        rates, visits = self.rates.copy(), self.visits.copy()
        rates[rows] = correct.mean(axis=1)
        np.add.at(visits, rows, 1)
        return PromptHistory(rates, visits)


class Prompts(NamedTuple):
    """What a curriculum knows of N prompts; `rates` and `visits` as in `PromptHistory`."""

    rates: Float[np.ndarray, " N"]
    visits: Int[np.ndarray, " N"]
    sources: Sequence[str]  # data source of each prompt

    def rates_of(self, mask: np.ndarray) -> Float[np.ndarray, " n"]:
        """The rates of the visited prompts of a mask."""
        return self.rates[mask & (self.visits > 0)]


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """A module and its options."""

    module: ModuleType
    options: Any

    def draw(self, prompts: Prompts, seed: Sequence[int], count: int) -> Int[np.ndarray, " count"]:
        """The numbers of `count` prompts; prompts come again only if N is smaller."""
        with running(FIELD, self.module, "weights"):
            weights = np.asarray(self.module.weights(prompts, self.options), np.float64)
            if weights.shape != prompts.visits.shape or not (
                np.isfinite(weights).all() and (weights >= 0).all()
            ):
                raise ValueError("the weights must be one finite number of at least 0 per prompt")
        # Efraimidis and Spirakis 2006: the smallest of such numbers are a draw by weight.
        times = np.random.default_rng((*seed, _DRAWS)).standard_exponential(len(weights))
        with np.errstate(divide="ignore"):
            order = np.lexsort((times, times / weights))
        return order[np.arange(count) % len(order)]


def find_curriculum(entry: str) -> Curriculum | None:
    """The curriculum that `data.curriculum` names; None for "". UserError for a wrong entry."""
    if not entry:
        return None
    return Curriculum(*module_with_options(FIELD, entry, __name__, PARTS))
