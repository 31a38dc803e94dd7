"""Lessons: a data source opens when all before it are learned; what is learned is reviewed.

A lesson is learned when the mean of the last shares of correct responses to its visited prompts is
at least `learned`, after `visits` of them or all. The lessons are the data sources in the order of
their first prompts.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from semrl_jax.data.curricula import Prompts
from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Options:
    learned: float = setting(0.7, "share of correct responses of a learned lesson", within="[0, 1]")
    visits: float = setting(
        32, "visited prompts before a lesson may count as learned", "prompts", at_least=1
    )
    review: float = setting(0.2, "weight of the prompts of learned lessons", within="[0, 1]")


def weights(prompts: Prompts, options: Options) -> np.ndarray:
    sources, found = np.array(prompts.sources), np.zeros(len(prompts.sources))
    lessons = [sources == source for source in dict.fromkeys(prompts.sources)]
    for mask in lessons:
        rates = prompts.rates_of(mask)
        enough = len(rates) >= min(options.visits, mask.sum())
        if not (enough and rates.mean() >= options.learned):
            found[mask] = 1.0
            return found
        found[mask] = options.review
    return np.ones(len(sources))  # all are learned
