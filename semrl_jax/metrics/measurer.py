"""Metrics of responses as they arrive, for the trainer and for replicas. Loads JAX."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from semrl_jax.metrics import (
    RELEASE_METRICS,
    Measurement,
    MetricKey,
    dataset_metrics,
    hidden_state_metrics,
    mean_hidden_state,
)
from semrl_jax.metrics.measurements import Metrics
from semrl_jax.metrics.metric import load_metric
from semrl_jax.metrics.names import FINAL_LAYER
from semrl_jax.support.programs import compiled_once
from semrl_jax.support.rounding import next_power_of_two
from semrl_jax.types import MetricParams, Rollout

MIN_METRIC_TOKENS = 32
MAX_GROUP = 64
MAX_GROUP_ENTRIES = 2**19  # larger responses have a call each: the overhead is small then
MAX_HELD_BYTES = 2**31  # of hidden states on a replica; above, the engine waits
MAX_HELD_RESPONSES = 256
SERIES = MetricKey("effective_rank", "series")
MAX_COMPILED = 32  # functions with different options; each has one program per length bucket
FLUSH_AFTER_S = 1.0  # without a new response; a caller gives up on a replica that is silent


class Measured(NamedTuple):
    """What was measured of one response."""

    metrics: dict[MetricKey, Measurement]  # float32 and bool, from the columns of its call
    mean_states: Float[np.ndarray, "L D"]  # float32, of its hidden states
    # Float32, of its prefixes in the final layer; None if it has none, or without ER.
    effective_ranks: Float[np.ndarray, " K"] | None = None
    # Float32, each metric of these prefixes by name, if the measurer was asked for them.
    series: Mapping[str, Float[np.ndarray, " K"]] = MappingProxyType({})


def join_layers(measured: Mapping[int, Measured]) -> Measured:
    """Joins the results of one response by layer."""
    metrics = {
        key._replace(layer=layer): found
        for layer, of_layer in measured.items()
        for key, found in of_layer.metrics.items()
    }
    means = np.concatenate([part.mean_states for part in measured.values()])
    final = measured[FINAL_LAYER]
    return Measured(metrics, means, final.effective_ranks, final.series)


class _Kind(NamedTuple):
    """What the responses of one call have in common."""

    bucket: int
    width: int
    dtype: np.dtype


class _Waiting(NamedTuple):
    hidden_states: Float[np.ndarray, "T D"]
    future: Future[Measured]


class Measurer(contextlib.AbstractContextManager):
    """Runs `hidden_state_metrics` on responses as they arrive, one layer at a time. Thread-safe.

    Small responses of one bucket, width and dtype share a call with a fixed number of places,
    because the overhead of a call is as large as the arithmetic of a small response. The other
    responses of a call do not change a result. A response whose future is cancelled before its call
    starts is left out.

    Args:
      max_tokens: response limit. Lengths are padded to powers of two from 32 to max_tokens.
      num_threads: how many calls run at the same time.
      dataset_stride: responses between two prefixes of a batch; 0 measures no batch.
      layers: of the rows of the mean states of a batch.
      device_batch: 0 measures on the host; N above 0 measures N responses in parallel on the first
        local device.
      series: whether the values of all prefixes are kept for each metric, in `Measured.series`.
      options: stride, window, method and names of `hidden_state_metrics`.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        num_threads: int,
        dataset_stride: int = 0,
        layers: tuple[int, ...] = (FINAL_LAYER,),
        device_batch: int = 0,
        series: bool = False,
        **options,
    ):
        self.layers = layers
        self._max_tokens = max_tokens
        self._pool = ThreadPoolExecutor(num_threads, "metrics")
        self._dataset_stride = dataset_stride
        self._device_batch = device_batch
        for name in options.get("names", RELEASE_METRICS):
            load_metric(name)  # an invalid module of a user fails here, not at the first response
        self._measure = _compiled(
            _measure, **options, side_by_side=device_batch > 0, all_series=series
        )
        self._keeps_series = series
        shared = {name: options[name] for name in ("window", "method", "names") if name in options}
        self._measure_dataset = _compiled(dataset_metrics, **shared, stride=dataset_stride)
        self._host = jax.local_devices(backend="cpu")[0]
        self._device = jax.local_devices()[0] if device_batch else self._host
        self._lock = threading.Lock()
        self._waiting: dict[_Kind, list[_Waiting]] = {}
        self._closed = False

    def submit(self, hidden_states: Float[np.ndarray, "T D"]) -> Future[Measured]:
        """Measures one response of at least one token, at the latest after the next `flush`.

        The rows are kept by reference and must not change. ValueError: more than `max_tokens` rows,
        or a width of 0. RuntimeError: after `close`.
        """
        length, width = hidden_states.shape
        if length > self._max_tokens:
            raise ValueError(
                f"hidden_states has {length} tokens; at most max_tokens={self._max_tokens} are "
                "measured: raise max_tokens, or truncate the response."
            )
        if width == 0:
            shape = hidden_states.shape
            raise ValueError(f"hidden_states has shape {shape}; its width D must be at least 1.")
        bucket = max(next_power_of_two(length), MIN_METRIC_TOKENS)
        bucket = min(bucket, max(self._max_tokens, MIN_METRIC_TOKENS))
        kind = _Kind(bucket, width, hidden_states.dtype)
        item = _Waiting(hidden_states, Future())
        with self._lock:
            self._check_open()
            group = self._waiting.setdefault(kind, [])
            group.append(item)
            if len(group) == self._places(kind):
                self._start(kind)
        return item.future

    def prepare(self, width: int, dtype: np.dtype, num_responses: int) -> None:
        """Starts to compile, in its threads, what the longest responses and a batch will need."""
        self.submit(np.zeros((self._max_tokens, width), dtype))
        self.flush()
        self.submit_batch(np.zeros((num_responses, len(self.layers), width), np.float32))

    def flush(self) -> None:
        """Starts the calls that are not full."""
        with self._lock:
            for kind in list(self._waiting):
                self._start(kind)

    def submit_batch(self, means: Float[np.ndarray, "B L D"] | None) -> Future[dict[str, float]]:
        """Starts measuring mean states as one set: valid metrics by `MetricKey.dataset_label`."""
        with self._lock:
            self._check_open()
            return self._pool.submit(self._measure_batch, means)

    def close(self) -> None:
        """Waits for running calls and cancels all other futures."""
        with self._lock:
            self._closed = True
            groups = list(self._waiting.values())
            self._waiting.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for group in groups:
            _cancel(group)

    def __exit__(self, *_):
        self.close()

    def _check_open(self) -> None:
        """Raises RuntimeError after `close`; the caller holds the lock."""
        if self._closed:
            raise RuntimeError("this Measurer is closed: submit before close, or make another one.")

    def _places(self, kind: _Kind) -> int:
        if self._device_batch:
            return self._device_batch
        return min(max(MAX_GROUP_ENTRIES // (kind.bucket * kind.width), 1), MAX_GROUP)

    def _start(self, kind: _Kind) -> None:
        """Hands a group to the threads; the caller holds the lock."""
        group = self._waiting.pop(kind)
        call = self._pool.submit(self._measure_group, group, kind)
        call.add_done_callback(lambda call: call.cancelled() and _cancel(group))

    def _measure_group(self, group: list[_Waiting], kind: _Kind) -> None:
        group = [item for item in group if item.future.set_running_or_notify_cancel()]
        if not group:
            return
        try:
            for item, found in zip(group, self._measured(group, kind)):
                item.future.set_result(found)
        except BaseException as error:  # raised where the results are awaited
            for item in group:
                if not item.future.done():
                    item.future.set_exception(error)

    def _measured(self, group: list[_Waiting], kind: _Kind) -> list[Measured]:
        padded = np.zeros((self._places(kind), kind.bucket, kind.width), kind.dtype)
        mask: Bool[np.ndarray, "G T"] = np.zeros(padded.shape[:2], bool)
        for i, item in enumerate(group):
            padded[i, : len(item.hidden_states)] = item.hidden_states
            mask[i, : len(item.hidden_states)] = True
        with jax.default_device(self._device):
            metrics, means = jax.device_get(self._measure(padded, mask))
        return _by_response(metrics, means, self._keeps_series)[: len(group)]

    def _measure_batch(self, means: Float[np.ndarray, "B L D"] | None) -> dict[str, float]:
        if not self._dataset_stride or means is None:
            return {}
        result = {}
        for layer, rows in zip(self.layers, np.swapaxes(means, 0, 1), strict=True):
            with jax.default_device(self._host):
                found = jax.device_get(self._measure_dataset(rows))
            for key, (value, valid) in found.items():
                if valid:
                    result[key._replace(layer=layer).dataset_label] = float(value)
        return result


async def measure_each(
    rollouts: AsyncGenerator[Rollout, None],
    params: MetricParams,
    *,
    max_tokens: int,
    keep_states: bool,
) -> AsyncIterator[Rollout]:
    """Yields each rollout once it is measured, on the host, while others are being sampled.

    Takes no more rollouts while MAX_HELD_BYTES or MAX_HELD_RESPONSES are waiting. They have hidden
    states of layer -1, in any order, and are closed at the end in any case. `keep_states` leaves
    `hidden_states` in them.
    """
    options = dataclasses.asdict(params)
    del options["dtype"]
    options["num_threads"] = min(params.num_threads, os.cpu_count() or 1)
    measurer = Measurer(max_tokens=max_tokens, **options)
    pending: dict[asyncio.Future[Measured], Rollout] = {}
    arriving: asyncio.Task[Rollout | None] | None = None
    num_held, ended = 0, False  # bytes
    try:
        while pending or not ended:
            full = num_held >= MAX_HELD_BYTES or len(pending) >= MAX_HELD_RESPONSES
            if arriving is None and not ended and not full:
                arriving = asyncio.create_task(_next(rollouts))
            if arriving is None:
                measurer.flush()  # no other response will fill the places left
            awaited = [*pending, arriving] if arriving else list(pending)
            done, _ = await asyncio.wait(
                awaited, timeout=FLUSH_AFTER_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                measurer.flush()
            if arriving in done:
                rollout, arriving = arriving.result(), None
                ended = rollout is None
                if rollout is not None:
                    measured = measurer.submit(rollout.policy_states(-1))
                    pending[asyncio.wrap_future(measured)] = rollout
                    num_held += rollout.num_state_bytes
            for future in [future for future in pending if future in done]:
                rollout = pending.pop(future)
                num_held -= rollout.num_state_bytes
                metrics, (mean_state,), ranks, _ = future.result()
                rollout = dataclasses.replace(
                    rollout, metrics=metrics, mean_state=mean_state, effective_ranks=ranks
                )
                if not keep_states:
                    layers = rollout.layers if rollout.prompt_states is not None else ()
                    rollout = dataclasses.replace(rollout, hidden_states=None, layers=layers)
                yield rollout
    finally:
        if arriving is not None:
            arriving.cancel()
            await asyncio.wait([arriving])  # a generator that runs cannot be closed
        await rollouts.aclose()
        for future in pending:
            future.cancel()
        await asyncio.to_thread(measurer.close)


async def _next(rollouts: AsyncGenerator[Rollout, None]) -> Rollout | None:
    return await anext(rollouts, None)


def _cancel(group: list[_Waiting]) -> None:
    """Cancels the futures, and notifies `concurrent.futures.wait`."""
    for item in group:
        item.future.cancel()
        item.future.set_running_or_notify_cancel()


@functools.lru_cache(maxsize=MAX_COMPILED)
def _compiled(function: Callable, **options: Hashable) -> Callable:
    """The jitted function, one for equal options; a limited number, as these come from clients."""
    return compiled_once(jax.jit(functools.partial(function, **options)))


def _measure(
    hidden_states: Float[Array, "G T D"],
    mask: Bool[Array, "G T"],
    all_series: bool = False,
    **options,
) -> tuple[dict[MetricKey, Measurement], Float[Array, "G D"]]:
    names = options.get("names", RELEASE_METRICS)
    series = names if all_series else {SERIES.name}.intersection(names)
    metrics = hidden_state_metrics(hidden_states, mask, **options, series=tuple(series))
    return metrics, jax.vmap(mean_hidden_state)(hidden_states, mask)


def _by_response(
    metrics: Metrics, means: Float[np.ndarray, "G D"], keeps_series: bool
) -> list[Measured]:
    """What was measured of each response of a batch."""
    series = {
        key.name: [values[valid] for values, valid in zip(*found, strict=True)]
        for key, found in metrics.items()
        if key.order == SERIES.order
    }
    ranks = series.get(SERIES.name, [()] * len(means))
    columns = {key: found for key, found in metrics.items() if key.order != SERIES.order}
    return [
        Measured(
            {key: Measurement(value[i], valid[i]) for key, (value, valid) in columns.items()},
            means[i][None],
            ranks[i] if len(ranks[i]) else None,
            {name: rows[i] for name, rows in series.items()} if keeps_series else {},
        )
        for i in range(len(means))
    ]
