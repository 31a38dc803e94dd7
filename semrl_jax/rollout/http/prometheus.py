"""The counts of a replica for Prometheus.

The page has numbers and the names of engine and replica. It has no token, prompt or response.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from semrl_jax.rollout.server.counts import Counts
from semrl_jax.types import ReplicaDescription

_PREFIX = "semrl_rollout_"


class Collector:
    """Reads the counts when asked for, also where vLLM has prometheus_client count in files."""

    def __init__(self, counts: Counts, description: ReplicaDescription):
        self._counts = counts
        self._info = {
            "engine": description.engine,
            "engine_version": description.engine_version,
            "replica": description.replica_id,
        }

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily(_PREFIX + "replica", "Engine and name of the replica.", self._info)
        c = self._counts
        for name, text, value in (  # the library ends these names with _total
            ("response_tokens", "Sampled tokens of sent responses.", c.response_tokens),
            ("aborts", "Abort calls that ended running calls.", c.aborts),
            ("weight_update_seconds", "Time of committed updates, in all.", c.update_s),
            ("weight_pause_seconds", "Time in which updates kept new calls waiting.", c.pause_s),
        ):
            yield CounterMetricFamily(_PREFIX + name, text, value)
        for name, text, label, values in (
            ("responses", "Responses sent.", "finish_reason", c.responses),
            ("sent_bytes", "Bytes of sent responses.", "kind", c.sent_bytes),
            ("weight_updates", "Weight updates by how they ended.", "result", c.updates),
        ):
            family = CounterMetricFamily(_PREFIX + name, text, labels=[label])
            for key, value in dict(values).items():
                family.add_metric([key], value)
            yield family
        for name, text, value in (
            ("running_calls", "Generate calls that run.", c.running),
            ("waiting_calls", "Generate calls that wait for a commit.", c.waiting),
            ("unfinished_responses", "Responses that running calls still send.", c.unfinished),
            ("paused", "1: calls are refused until Resume.", int(c.is_paused)),
            ("weight_step", "Step of the weights it serves.", c.weight_step),
        ):
            if value is not None:  # before the first weights
                yield GaugeMetricFamily(_PREFIX + name, text, value)
