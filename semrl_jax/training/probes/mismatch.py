"""Differences of rollout engine and training model: log-probabilities and hidden states."""

from __future__ import annotations

import dataclasses

import numpy as np

from semrl_jax.sampling.annealing import distribution_at
from semrl_jax.sampling.statistics import logprob_mismatch, state_differences, state_mismatch
from semrl_jax.training.plan import PassNeeds
from semrl_jax.training.probes import Probe, Seen, Tools, is_due


def probe(tools: Tools) -> Probe:
    return Mismatch(tools)


@dataclasses.dataclass
class Mismatch(Probe):
    """`rollout/..._mismatch/{mean,max}`.

    A process compares the states of the responses for which it has both. Log-probabilities are
    compared where somebody computed them anyway.
    """

    tools: Tools

    def needs(self, step: int) -> PassNeeds:
        return PassNeeds(states=is_due(self.tools.config.hidden_states.compare_every, step))

    def after(self, seen: Seen) -> dict[str, float]:
        scalars = {}
        if seen.logprobs is not None and seen.counted.any():
            rows = np.flatnonzero(seen.counted.any(axis=1))
            scalars |= logprob_mismatch(
                [seen.scored[row].rollout for row in rows],
                np.asarray(seen.logprobs)[rows],
                **distribution_at(seen.step, self.tools.config.rollout),
            )
        if self.needs(seen.step).states:
            own = state_differences(seen.scored, seen.tokens.states)
            scalars |= state_mismatch(self.tools.peers.gather("mismatch", own))
        return scalars
