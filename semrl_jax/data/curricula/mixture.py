"""Data sources in given shares, however many prompts each has: `share=SOURCE,NUMBER`, repeated.

A source without a share is not drawn. The shares are relative to each other.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from semrl_jax.data.curricula import FIELD, Prompts
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Options:
    share: tuple[str, ...] = setting((), "SOURCE,NUMBER", items=str)

    def __post_init__(self):
        if not self.shares:
            raise ValueError("mixture needs :share=SOURCE,NUMBER for each source.")

    @property
    def shares(self) -> dict[str, float]:
        found = {}
        for entry in self.share:
            source, _, text = entry.rpartition(",")
            if source in found:
                raise UserError(f"{FIELD}: {source!r:.100} has two shares; keep one.")
            try:
                found[source] = float(text)
            except ValueError:
                found[source] = -1.0
            if not source or not 0 < found[source] < 1e9:
                raise UserError(f"{FIELD}: share={entry!r:.100} must be SOURCE,NUMBER above 0.")
        return found


def weights(prompts: Prompts, options: Options) -> np.ndarray:
    sources = np.array(prompts.sources)
    found = np.zeros(len(sources))
    for source, share in options.shares.items():
        mask = sources == source
        if not mask.any():
            known = ", ".join(dict.fromkeys(prompts.sources))
            raise UserError(
                f"{FIELD}: no prompt is of {source!r:.100}; the sources are {known:.300}."
            )
        found[mask] = share / mask.sum()
    return found
