"""First and second order of the effective rank over growing prefixes of one response."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Bool, Float

from semrl_jax.metrics.batch import hidden_state_metrics
from semrl_jax.metrics.measurements import MetricKey
from semrl_jax.metrics.names import ORDERS
from semrl_jax.metrics.valid_rows import AnyArray, check_states


class RankDynamics(NamedTuple):
    """Effective rank (ER), its velocity (ERV) and its acceleration (ERA); float32 scalars."""

    effective_rank: Float[Array, ""]
    effective_rank_velocity: Float[Array, ""]
    effective_rank_acceleration: Float[Array, ""]


def rank_dynamics(
    hidden_states: Float[AnyArray, "T D"],
    response_mask: Bool[AnyArray, " T"],
    *,
    stride: int,
    window: str = "exact",
    method: str = "svd",
) -> RankDynamics:
    """Computes the effective rank of a response, its velocity and its acceleration.

    Args:
      hidden_states, response_mask, method: as in `Metric.__call__`.
      stride: tokens between two prefixes, at least 1; ERA needs three strides of tokens.
      window: "exact" (default): prefixes of exactly j * stride tokens of the whole response.
        "release": of the last 512 valid tokens, prefixes of t + 1 tokens for t = stride, 2 stride,
        ... below their number; none if there are fewer than 2 stride. "later": as "release" without
        the limit of 512 tokens, and the whole response as one more prefix.

    Returns:
      ER, ERV and ERA; ERV is 0.0 below two windows and ERA below three.

    Raises:
      ValueError: for a wrong rank, shape, dtype, stride, window or method.

    Source: arXiv:2509.23808. The paper's window rule is not known here: "exact" is the rule of
    this project, "release" the rule of the reference implementation, and "later" the rule of its
    later revisions.
    """
    check_states(hidden_states, response_mask)
    measured = hidden_state_metrics(
        hidden_states[None], response_mask[None], stride=stride, window=window,
        names=("effective_rank",), method=method,
    )  # fmt: skip
    return RankDynamics(*(measured[MetricKey("effective_rank", o)].value[0] for o in ORDERS))
