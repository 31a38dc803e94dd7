"""Metrics of the hidden states of responses. Pure; no config, no model, no random key.

A metric of one response is one module of `kinds`, and a function here under the module's name;
`batch` measures batches with them, `measurer` responses as they arrive, on all cores. A number of
several responses, or of two models, is one module of `sets`.
"""

from semrl_jax.metrics.measurements import Measurement, MetricKey, flatten
from semrl_jax.metrics.metric import Metric, load_metric
from semrl_jax.metrics.names import METHODS, METRICS, RELEASE_METRICS, WINDOWS, window_sizes
from semrl_jax.support.lazy import lazy_names
from semrl_jax.support.modules import module_names

# Loaded at their first use: settings are checked and replicas serve without JAX.
_LAZY = (
    dict.fromkeys(("dataset_metrics", "hidden_state_metrics", "mean_hidden_state"), "batch")
    | dict.fromkeys(("RankDynamics", "rank_dynamics"), "batch")
    | dict.fromkeys(("Measured", "Measurer"), "measurer")
    | {name: f"sets.{name}" for name in module_names("semrl_jax.metrics.sets")}
)
__all__ = ["METHODS", "METRICS", "RELEASE_METRICS", "WINDOWS", "Measurement", "Metric"]
__all__ += ["MetricKey", "flatten", "window_sizes", *METRICS, *_LAZY]
_find = lazy_names(__name__, _LAZY)


def __getattr__(name: str):
    return load_metric(name) if name in METRICS else _find(name)
