"""How far the hidden states of a policy have moved from those of its reference, for the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from semrl_jax.cluster.peers import Peers
from semrl_jax.metrics import drift, linear_cka
from semrl_jax.rounding import next_power_of_two

NAMES = ("distance", "angle", "cka")
States = Mapping[int, Float[np.ndarray, "_ D"]]


def reference_drift(policy: States, reference: States, peers: Peers) -> dict[str, float]:
    """Means over the responses of `drift` and `linear_cka`.

    Args:
      policy, reference: states of the same responses, by index: those in this process. A response
        whose states are not finite is left out.
      peers: the processes that have the other responses.

    Returns:
      `drift/{distance,angle,cka}`; nothing if no response is left.
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
