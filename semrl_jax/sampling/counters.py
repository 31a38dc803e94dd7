"""What happened while a step was sampled, for its row of the log."""

from __future__ import annotations

import collections
import dataclasses
import time

from semrl_jax.cluster.peers import Processes
from semrl_jax.rewards import VerifierPool
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.client.replica import Figures
from semrl_jax.sampling.episodes import Episodes


@dataclasses.dataclass
class Events:
    """Counts events and bytes on the wire."""

    client: RolloutClient | None  # None if this process does not sample
    verifier: VerifierPool
    episodes: Episodes
    peers: Processes
    may_take_over: bool  # whether replicas take over calls of others

    def __post_init__(self):
        self._before = self._totals()

    def __call__(self) -> dict[str, float]:
        """The events since the last call, summed over all processes, which call it together."""
        totals = self._totals()
        own = {name: float(count - self._before.get(name, 0)) for name, count in totals.items()}
        self._before = totals
        summed: collections.Counter[str] = collections.Counter()
        for part in self.peers.gather("count", own):
            summed.update(part)
        return dict(summed)

    def _totals(self) -> dict[str, int]:
        totals = {f"reward/{name}": value for name, value in self.verifier.counters.items()}
        totals |= {f"episode/{name}": value for name, value in self.episodes.counters.items()}
        if self.client is not None:
            totals |= {f"rollout/{name}": value for name, value in self.client.counters.items()}
            if not self.may_take_over:
                totals.pop("rollout/taken_over", None)
        return totals


@dataclasses.dataclass
class ReplicaFigures:
    """Measures what each of several replicas does."""

    client: RolloutClient | None  # None if this process does not sample
    peers: Processes
    sampling: tuple[int, ...]  # the processes that sample

    def __post_init__(self):
        self._before: dict[int, Figures] = {}
        self._at = time.monotonic()

    def __call__(self) -> dict[str, float]:
        """What each of several replicas did since the last call; all processes call it together.

        `rollout/replica/<n>/tokens_per_s` is its speed while it had a call, and
        `time/replica/<n>/busy_fraction` the share of the time in which it had one.
        """
        now, found = time.monotonic(), {}
        for number, figures in (self.client.figures if self.client is not None else {}).items():
            before = self._before.get(number, Figures())
            self._before[number] = figures
            name = number * len(self.sampling) + self.sampling.index(self.peers.index)
            busy_s = figures.busy_s - before.busy_s
            if busy_s > 0:
                tokens_per_s = (figures.tokens - before.tokens) / busy_s
                found[f"rollout/replica/{name}/tokens_per_s"] = tokens_per_s
            found[f"time/replica/{name}/busy_fraction"] = busy_s / max(now - self._at, 1e-9)
        self._at = now
        of_all: dict[str, float] = {}
        for part in self.peers.gather("count", found):
            of_all.update(part)
        num_replicas = sum(name.startswith("time/") for name in of_all)
        return of_all if num_replicas > 1 else {}
