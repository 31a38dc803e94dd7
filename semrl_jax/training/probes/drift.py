"""How far the hidden states of a policy have moved from those of its reference, for the log."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from semrl_jax.cluster.peers import Peers
from semrl_jax.metrics import drift, linear_cka
from semrl_jax.support.rounding import next_power_of_two
from semrl_jax.training.passes import PassNeeds
from semrl_jax.training.probes import Probe, Seen, Tools, is_due

NAMES = ("distance", "angle", "cka")
States = Mapping[int, Float[np.ndarray, "_ D"]]


def probe(tools: Tools) -> Probe | None:
    every = tools.config.metrics.drift_every
    return Drift(every, tools.peers) if every else None


@dataclasses.dataclass
class Drift(Probe):
    """`metrics/drift/...` in every so many steps."""

    every: int
    peers: Peers

    def needs(self, step: int) -> PassNeeds:
        due = is_due(self.every, step)
        return PassNeeds(states=due, reference_states=due)

    def before(self, seen: Seen) -> Seen:
        if not is_due(self.every, seen.step):
            return seen
        found = reference_drift(seen.tokens.states, seen.reference_states, self.peers)
        return seen.with_scalars({f"metrics/{name}": value for name, value in found.items()})


def reference_drift(policy: States, reference: States, peers: Peers) -> dict[str, float]:
    """Means over the responses of `drift` and `linear_cka`.

    A process has the states of some responses, by index. A response whose states are not finite is
    left out. Returns `drift/{distance,angle,cka}`; nothing if no response is left.
    """
    own = [_of_response(policy[index], reference[index]) for index in sorted(policy)]
    rows = [row for part in peers.gather("drift", own) for row in part if row]
    if not rows:
        return {}
    return {f"drift/{name}": float(mean) for name, mean in zip(NAMES, np.mean(rows, axis=0))}


def _of_response(
    policy: Float[np.ndarray, "T D"], reference: Float[np.ndarray, "T D"]
) -> Sequence[float]:
    if not (np.isfinite(policy).all() and np.isfinite(reference).all()):
        return ()
    size = next_power_of_two(len(policy))  # few lengths are compiled
    padding = ((0, size - len(policy)), (0, 0))
    both = [np.pad(states.astype(np.float32), padding) for states in (policy, reference)]
    mask = np.arange(size) < len(policy)
    return [float(value) for value in (*drift(*both, mask), linear_cka(*both, mask))]
