"""Metrics of the hidden states of responses. Pure; no config, no model, no random key.

A metric is one module of `kinds`; `batch` measures batches with them.
"""

from semrl_jax.lazy import lazy_names
from semrl_jax.metrics.metric import Metric
from semrl_jax.metrics.names import (
    METHODS,
    METRICS,
    WINDOWS,
    count_windows,
)
from semrl_jax.metrics.records import Measurement, MetricKey, flatten

__all__ = [
    "METHODS",
    "METRICS",
    "WINDOWS",
    "Measurement",
    "Metric",
    "MetricKey",
    "PrefixDynamics",
    "RankDynamics",
    "RankSeries",
    "count_windows",
    "curvature",
    "dataset_metrics",
    "effective_rank",
    "flatten",
    "hidden_state_metrics",
    "log_effective_rank",
    "mean_hidden_state",
    "prefix_dynamics",
    "rank_dynamics",
    "rank_series",
    "response_entropy",
    "traditional_rank",
]

# Settings are checked and replicas serve without JAX.
__getattr__ = lazy_names(
    __name__,
    dict.fromkeys(("dataset_metrics", "hidden_state_metrics", "mean_hidden_state"), "batch")
    | dict.fromkeys(
        ("RankDynamics", "RankSeries", "prefix_dynamics", "rank_dynamics", "rank_series"),
        "dynamics",
    )
    | {"PrefixDynamics": "windows", "traditional_rank": "kinds.traditional_rank"}
    | {"effective_rank": "kinds.effective_rank", "curvature": "kinds.curvature"}
    | {"log_effective_rank": "kinds.log_effective_rank"}
    | {"response_entropy": "kinds.response_entropy"},
)
