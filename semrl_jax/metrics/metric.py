"""How a metric is declared and found. Loads no JAX until a metric is loaded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from semrl_jax.support.errors import UserError
from semrl_jax.support.modules import load_module


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric of the hidden states of one response, declared once as `METRIC` of its module.

    The name of the module is the name of the metric. Velocity and acceleration follow from the
    values of prefixes, so a metric declares values only. Exactly one of `of_spectrum` and
    `of_states` is given. Both are functions that JAX can trace.

    Attributes:
      min_tokens: the shortest response that has the metric.
      of_spectrum: (sigma [S], scale, num_rows, width) -> scalar, float32 or float64 as `sigma`.
        `sigma` are the singular values of the centred rows, descending, zeros after them, in units
        of `scale`, the power of two that the rows were divided by. `num_rows` is int32, `width` the
        Python int D. One decomposition of each prefix serves all such metrics.
      of_states: (rows) -> function of the int32 number of rows of a prefix -> float32 scalar.
        `rows` are `valid_rows.Rows` [T, D]. The first function computes what all prefixes share.
        The second one is called for each prefix, under `jax.vmap`.
      of_sums: for `of_spectrum`, optional: (sums, scale, num_rows, width) -> the same value from
        `nested.SpectralSums` in units of `scale`. Measures the prefixes of long responses faster.
        All arrays have the shape of `num_rows`.
      centred: for `of_spectrum`: False for the singular values of the rows as they are. All such
        metrics share a second decomposition.
      needs_all_values: for `of_spectrum`: if float32 does not resolve every singular value, the
        response is measured in float64.
    """

    min_tokens: int
    of_spectrum: Callable[..., Any] | None = None
    of_states: Callable[..., Any] | None = None
    of_sums: Callable[..., Any] | None = None
    centred: bool = True
    needs_all_values: bool = False

    def __post_init__(self) -> None:
        if (self.of_spectrum is None) == (self.of_states is None):
            raise ValueError("a Metric takes one of of_spectrum and of_states.")

    def __call__(self, hidden_states: Any, response_mask: Any, *, method: str = "svd") -> Any:
        """Measures one response.

        Args:
          hidden_states: [T, D] of any real float dtype, computed in float32; row t gave response
            token t. Rows outside the mask may hold anything, NaN too.
          response_mask: bool [T], True on tokens that count; holes are allowed, valid rows keep
            their order.
          method: of metrics of the spectrum. "svd": singular values from eigenvalues of a Gram
            matrix in float64, or from the rows where one is below 3e-5 of the largest. "gram": from
            a Gram matrix in float32, and again in float64 where that does not resolve them.

        Returns a float32 scalar; 0.0 if a valid row is not finite, and for the metrics of this
        package below `min_tokens`. Raises ValueError for a wrong rank, shape, dtype or method.
        """
        from semrl_jax.metrics.prefixes import whole_response  # loads JAX

        return whole_response(self, hidden_states, response_mask, method)


@functools.cache
def load_metric(path: str) -> Metric:
    """A metric by its name in METRICS, or by the path of a user's module; UserError if none."""
    metric = load_module("metrics.names", path, "semrl_jax.metrics.kinds", ("METRIC",)).METRIC
    if not isinstance(metric, Metric):
        raise UserError(f"metrics.names={path!r}: METRIC must be a semrl_jax.metrics.Metric.")
    return metric
