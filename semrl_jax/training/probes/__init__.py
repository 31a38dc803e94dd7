"""Numbers about a step: scalars for the log, metrics for the shaping. One module per probe.

A module defines `probe(tools)`, which returns a `Probe`, or None if the config does not ask for it.
The config names a user's modules in `metrics.probes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import ml_collections
import numpy as np
from jaxtyping import Array, Bool, Float

from semrl_jax.cluster.peers import Peers
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.metrics.measurements import Measurement, MetricKey, Metrics
from semrl_jax.metrics.measurer import Measurer
from semrl_jax.sampling.scoring import Scored
from semrl_jax.support.errors import UserError
from semrl_jax.support.modules import load_module, running
from semrl_jax.training.passes import NOTHING, PassNeeds, PassPlan
from semrl_jax.training.policy_update import TokenPass
from semrl_jax.types import RolloutBatch

FIELD = "metrics.probes"
# In this order: a later one sees the metrics of those before.
BUILT_IN = (
    "tokens", "policy_states", "groups", "batch", "mismatch", "drift", "importance", "staleness",
)  # fmt: skip


class Tools(NamedTuple):
    """What `probe(tools)` can use to make a probe."""

    config: ml_collections.ConfigDict  # of the run
    plan: PassPlan  # which passes the run has
    peers: Peers  # the processes of the run
    measurer: Measurer | None  # measures hidden states; None if none are measured
    stop: StopRequest  # tells that the run is to end


class Seen(NamedTuple):
    """What probes see of a step."""

    step: int  # of the row of the log
    scored: Scored  # B responses with verdicts and metrics, in (group, sample) order
    batch: RolloutBatch  # their tokens, in NumPy
    # Results of the policy's own pass before the update, with the `entropies` and `states` that a
    # probe asked for; None if the step has no such pass.
    tokens: TokenPass | None = None
    # Final states [T, D] of responses under the reference, by index, in this process; None unless
    # asked for.
    reference_states: Mapping[int, Float[np.ndarray, "_ D"]] | None = None
    # Nats, of the policy before the update. None if nothing computes them; in `before`, None also
    # if the update is going to compute them.
    logprobs: Float[Array | np.ndarray, "B T"] | None = None
    # True on sampled tokens that `logprobs` has. A batch rule may leave responses out of an update.
    counted: Bool[np.ndarray, "B T"] | None = None
    scalars: Mapping[str, float] = {}  # for the row of the log, from the probes so far

    def updated(
        self, logprobs: Float[np.ndarray, "B T"] | None, trained: Bool[Array | np.ndarray, "B T"]
    ) -> Seen:
        if self.logprobs is not None:
            return self
        return self._replace(
            logprobs=logprobs, counted=np.asarray(trained) & self.batch.sampled_mask
        )

    def with_metrics(self, metrics: Metrics) -> Seen:
        """Adds metrics, [B] values and validities; ValueError for another number of entries."""
        columns = {
            key: Measurement(np.asarray(value), np.asarray(valid, bool))
            for key, (value, valid) in metrics.items()
        }
        for key, column in columns.items():
            shapes = [each.shape for each in column]
            if shapes != [(len(self.scored),)] * 2:
                raise ValueError(
                    f"the values and validities of {key.label!r} have the shapes {shapes}; both "
                    f"must have one entry for each of the {len(self.scored)} responses."
                )
        return self._replace(scored=self.scored.with_metrics(columns))

    def with_scalars(self, scalars: Mapping[str, float]) -> Seen:
        return self._replace(scalars={**self.scalars, **scalars})


class Probe:
    """Does nothing; a probe overrides what it needs. All processes call its functions together."""

    def needs(self, step: int) -> PassNeeds:
        """What `before` and `after` need of the passes of this step."""
        return NOTHING

    def before(self, seen: Seen) -> Seen:
        """Adds metrics or scalars before credit is assigned: the shaping may use the metrics."""
        return seen

    def after(self, seen: Seen) -> Mapping[str, Any]:
        """Scalars for the row of the log, by key, after the update."""
        return {}


class Probes(Probe):
    """Several probes as one; an error of a user's probe names its module."""

    def __init__(self, probes: Sequence[tuple[ModuleType, Probe]]):
        self._probes = tuple(probes)

    def needs(self, step: int) -> PassNeeds:
        found = NOTHING
        for module, probe in self._probes:
            with running(FIELD, module, "needs"):
                found |= probe.needs(step)
        return found

    def before(self, seen: Seen) -> Seen:
        for module, probe in self._probes:
            with running(FIELD, module, "before"):
                seen = probe.before(seen)
            for label in indicators_of(module):
                if MetricKey.parse(label) not in seen.scored.metrics:
                    raise UserError(
                        f"{FIELD}={module.__name__!r}: INDICATORS has {label!r}, but `before` "
                        "gives no such metric; it must return seen.with_metrics(...) with it."
                    )
        return seen

    def after(self, seen: Seen) -> dict[str, float]:
        """The scalars of all probes, from `before` and from `after`."""
        found = dict(seen.scalars)
        for module, probe in self._probes:
            with running(FIELD, module, "after"):
                scalars = probe.after(seen)
                found |= {name: float(value) for name, value in scalars.items()}
        return found


def load_probe(name: str) -> ModuleType:
    """The module of a name of BUILT_IN, or of a user's probe. Raises UserError if it is none."""
    return load_module(FIELD, name, __name__, ("probe",))


def indicators_of(module: ModuleType) -> tuple[str, ...]:
    """Labels of the metrics that a user's probe gives to the shaping, see `MetricKey.label`."""
    return tuple(getattr(module, "INDICATORS", ()))


def load_probes(tools: Tools) -> Probes:
    """The built-in probes that the config asks for, and the user's; UserError: one is unusable."""
    found = []
    for name in dict.fromkeys((*BUILT_IN, *tools.config.metrics.probes)):
        module = load_probe(name)
        with running(FIELD, module, "probe"):
            probe = module.probe(tools)
        if probe is None:
            continue
        if not isinstance(probe, Probe):
            raise UserError(
                f"{FIELD}={name!r}: probe(tools) must return a semrl_jax.training.probes.Probe or "
                f"None, not {type(probe).__name__}."
            )
        found.append((module, probe))
    return Probes(found)


def is_due(every: int, step: int) -> bool:
    """Whether the number of a step is a multiple of `every`; never if `every` is 0."""
    return bool(every) and step % every == 0
