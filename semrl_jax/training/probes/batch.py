"""Metrics of the mean hidden states of a whole batch, measured during the update."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from semrl_jax.metrics.measurer import Measurer
from semrl_jax.training.probes import Probe, Seen, Tools


def probe(tools: Tools) -> Probe | None:
    # The log is that of process 0.
    return Batch(tools.measurer) if tools.measurer is not None and not tools.peers.index else None


class Batch(Probe):
    def __init__(self, measurer: Measurer):
        self._measurer = measurer
        self._started: Future[dict[str, float]] | None = None

    def before(self, seen: Seen) -> Seen:
        means = seen.scored.mean_states
        if means is not None and seen.batch.given is not None:  # of sampled responses alone
            means = np.where(seen.batch.given[:, None, None], np.float32(np.nan), means)
        self._started = self._measurer.submit_batch(means)
        return seen

    def after(self, seen: Seen) -> dict[str, float]:
        return {f"metrics/{name}": value for name, value in self._started.result().items()}
