"""Metrics of the hidden states of responses. Pure; no config, no model, no random key.

A metric of one response is one module of `kinds`; `batch` measures batches with them, `parallel` on
all cores. A number of several responses, or of two models, is one module of `sets`.
"""

from semrl_jax.metrics.metric import Metric
from semrl_jax.metrics.names import METHODS, METRICS, RELEASE_METRICS, WINDOWS, count_windows
from semrl_jax.metrics.records import Measurement, MetricKey, flatten
from semrl_jax.support.lazy import lazy_names
from semrl_jax.support.modules import module_names

# Loaded at their first use: settings are checked and replicas serve without JAX.
_BATCH = ("dataset_metrics", "hidden_state_metrics", "mean_hidden_state")
_DYNAMICS = ("RankDynamics", "RankSeries", "prefix_dynamics", "rank_dynamics", "rank_series")
_LAZY = (
    dict.fromkeys(_BATCH, "batch")
    | dict.fromkeys(_DYNAMICS, "dynamics")
    | {"PrefixDynamics": "windows", "measure_batch": "parallel"}
    | {name: f"kinds.{name}" for name in METRICS}
    | {name: f"sets.{name}" for name in module_names("semrl_jax.metrics.sets")}
)
__all__ = ["METHODS", "METRICS", "RELEASE_METRICS", "WINDOWS", "Measurement", "Metric"]
__all__ += ["MetricKey", "count_windows", "flatten", *_LAZY]
__getattr__ = lazy_names(__name__, _LAZY)
