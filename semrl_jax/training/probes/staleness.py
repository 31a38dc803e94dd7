"""How many steps lie between the weights that sampled the responses and the update."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from semrl_jax.sampling.scoring import ScoredRollout
from semrl_jax.settings.rollout import num_parts
from semrl_jax.training.probes import Probe, Seen, Tools


def probe(tools: Tools) -> Probe:
    return Staleness(by_token=num_parts(tools.config.rollout) > 1)


@dataclasses.dataclass
class Staleness(Probe):
    by_token: bool

    def after(self, seen: Seen) -> dict[str, float]:
        return staleness(seen.scored, seen.step, by_token=self.by_token)


def staleness(
    scored: Sequence[ScoredRollout], step: int, *, by_token: bool = False
) -> dict[str, float]:
    """`rollout/staleness`, the mean, and `.../max`: steps from the weights of a response to `step`.

    Those of its oldest token count. With `by_token` also `.../tokens`, the mean over all tokens.
    Given responses have no weights.
    """
    responses = [item.rollout.versions for item in scored if not item.rollout.is_given]
    spans = [span for versions in responses for span in versions]
    ages = [step - min(span.version.step for span in versions) for versions in responses]
    found = {"rollout/staleness": float(np.mean(ages)), "rollout/staleness/max": float(max(ages))}
    if by_token:
        each, lengths = zip(*((step - s.version.step, s.end - s.start) for s in spans))
        found["rollout/staleness/tokens"] = float(np.average(each, weights=lengths))
    return found
