"""Metrics of a batch on all cores: each host thread measures one response at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from semrl_jax.metrics.batch import hidden_state_metrics
from semrl_jax.metrics.inputs import AnyArray, check_states, whole_number
from semrl_jax.metrics.records import Measurement, MetricKey
from semrl_jax.support.cores import usable_cores
from semrl_jax.support.errors import UserError
from semrl_jax.support.rounding import next_size

MIN_BUCKET = 32  # tokens
# The float64 copies of a response take up to 6.3 times its size. Half the batch measured at a time
# would take 3 times the batch; a quarter stays below 2 times.
MAX_SHARE = 0.25


def measure_batch(
    hidden_states: Float[AnyArray, "B T D"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    num_threads: int | None = None,
    **options: Any,
) -> dict[MetricKey, Measurement]:
    """Measures every response of a batch on all cores: `hidden_state_metrics`, only faster.

    On an accelerator, and inside a jitted function, it is one call of `hidden_state_metrics`. That
    call measures the responses side by side on an accelerator.

    Args:
      hidden_states, response_mask: as in `hidden_state_metrics`. Each response is cut after its
        last valid row, up to the next of 32, 48, 64, 96, 128, ... tokens, so short responses cost
        less and few lengths are compiled.
      num_threads: responses that are measured at a time; None: as many as the process has cores,
        but at most a quarter of the batch, which keeps the memory below twice the input.
      options: stride and others of `hidden_state_metrics`, but neither `side_by_side` nor
        `series`.

    Returns:
      As `hidden_state_metrics`, equal up to rounding.

    Raises:
      ValueError: as `hidden_state_metrics`, or for num_threads below 1.
    """
    for option in ("side_by_side", "series"):
        if option in options:
            raise UserError(
                f"{option} is no option of measure_batch, which cuts responses to several lengths "
                "and chooses the loop by the device; call hidden_state_metrics with it."
            )
    check_states(
        hidden_states, response_mask, axes="[B, T, D], one layer of a batch: add an axis to one "
        "response",
    )  # fmt: skip
    size = hidden_states.shape[0]
    num_threads = _check_threads(num_threads, size)
    traced = any(isinstance(x, jax.core.Tracer) for x in (hidden_states, response_mask))
    platform = _platform(hidden_states)
    if traced or platform != "cpu" or size == 0:
        side_by_side = platform != "cpu"
        return hidden_state_metrics(
            hidden_states, response_mask, side_by_side=side_by_side, **options
        )
    states, mask = np.asarray(hidden_states), np.asarray(response_mask)
    buckets = [bucket(row, states.shape[1]) for row in mask]
    device = jax.local_devices(backend="cpu")[0]

    def measure(i: int) -> dict[MetricKey, Measurement]:
        part = slice(i, i + 1), slice(buckets[i])
        with jax.default_device(device):  # of this thread
            return jax.device_get(hidden_state_metrics(states[part], mask[part], **options))

    # The longest first, so that no thread is left alone with one. The first response of each bucket
    # goes before all others, so that no program is compiled twice.
    order = sorted(range(size), key=lambda i: -buckets[i])
    first = list({buckets[i]: i for i in reversed(order)}.values())
    rest = [i for i in order if i not in first]
    with ThreadPoolExecutor(num_threads, "metrics") as pool:
        found = dict(zip(first, pool.map(measure, first)))
        found |= zip(rest, pool.map(measure, rest))
    rows = [found[i] for i in range(size)]
    return jax.tree.map(lambda *parts: jnp.asarray(np.concatenate(parts)), *rows)


def bucket(mask: Bool[np.ndarray, " T"], num_rows: int) -> int:
    """The length that a response is cut to: one of 32, 48, 64, 96, ..., or all rows."""
    length = len(mask) - int(np.argmax(mask[::-1])) if mask.any() else 0
    return min(next_size(length, MIN_BUCKET), num_rows)


def _platform(states: AnyArray) -> str:
    """Where the metrics are computed: where the states are, else the default device."""
    if isinstance(states, jax.Array) and not isinstance(states, jax.core.Tracer):
        return next(iter(states.devices())).platform
    default = jax.config.jax_default_device
    return getattr(default, "platform", default) or jax.default_backend()


def _check_threads(num_threads: Any, size: int) -> int:
    if num_threads is None:
        return max(1, min(usable_cores(), int(size * MAX_SHARE)))
    value = whole_number(num_threads)
    if value < 1:
        raise UserError(f"num_threads={num_threads!r} must be an integer of at least 1, or None.")
    return value
