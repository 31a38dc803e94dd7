"""How many steps lie between the weights that sampled the responses and the update."""

from __future__ import annotations

import dataclasses

from semrl_jax.sampling.statistics import staleness
from semrl_jax.settings.rollout import num_parts
from semrl_jax.training.probes import Probe, Seen, Tools


def probe(tools: Tools) -> Probe:
    return Staleness(by_token=num_parts(tools.config.rollout) > 1)


@dataclasses.dataclass
class Staleness(Probe):
    by_token: bool

    def after(self, seen: Seen) -> dict[str, float]:
        return staleness(seen.scored, seen.step, by_token=self.by_token)
