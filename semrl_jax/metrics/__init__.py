"""Pure mathematics of one response: rank, rank dynamics, curvature, entropy."""

from semrl_jax.choices import METHODS, METRICS, WINDOWS, count_windows
from semrl_jax.metrics.batch import dataset_metrics, hidden_state_metrics, mean_hidden_state
from semrl_jax.metrics.curvature import curvature
from semrl_jax.metrics.dynamics import (
    RankDynamics,
    RankSeries,
    prefix_dynamics,
    rank_dynamics,
    rank_series,
)
from semrl_jax.metrics.entropy import response_entropy
from semrl_jax.metrics.rank import effective_rank, log_effective_rank, traditional_rank
from semrl_jax.metrics.windows import PrefixDynamics

__all__ = [
    "METHODS",
    "METRICS",
    "WINDOWS",
    "PrefixDynamics",
    "RankDynamics",
    "RankSeries",
    "count_windows",
    "curvature",
    "dataset_metrics",
    "effective_rank",
    "hidden_state_metrics",
    "log_effective_rank",
    "mean_hidden_state",
    "prefix_dynamics",
    "rank_dynamics",
    "rank_series",
    "response_entropy",
    "traditional_rank",
]
