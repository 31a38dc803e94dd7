"""Metrics of the policy's own hidden states, with `hidden_states.source='policy'`."""

from __future__ import annotations

import dataclasses

from semrl_jax.cluster.agreement import run_phase
from semrl_jax.sampling.exchange import of_all
from semrl_jax.sampling.scoring import Scored, submit_turns
from semrl_jax.training.passes import PassNeeds
from semrl_jax.training.probes import Probe, Seen, Tools


def probe(tools: Tools) -> Probe | None:
    return PolicyStates(tools) if tools.plan.states else None


@dataclasses.dataclass
class PolicyStates(Probe):
    """Each process measures the responses whose states it has; all get all metrics."""

    tools: Tools

    def needs(self, step: int) -> PassNeeds:
        return PassNeeds(states=True)

    def before(self, seen: Seen) -> Seen:
        measurer, peers = self.tools.measurer, self.tools.peers

        def measure_own() -> Scored:
            states, scored = seen.tokens.states, seen.scored.take(list(seen.tokens.states))
            pending = [measurer.submit(rows) for rows in states.values()]
            turns = [
                submit_turns(measurer, item.rollout, rows, whole)
                for item, rows, whole in zip(scored, states.values(), pending, strict=True)
            ]
            measurer.flush()
            with self.tools.stop.interruptible():
                measured = [future.result() for future in pending]
                of_turns = [[future.result() for future in parts] for parts in turns]
            return scored.with_measured(measured, of_turns)

        return seen._replace(scored=of_all(peers, run_phase(peers, "metrics", measure_own)))
