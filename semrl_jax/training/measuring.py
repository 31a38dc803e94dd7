"""Metrics of responses as they arrive, in host threads or side by side on the accelerator."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from semrl_jax.metrics import dataset_metrics, hidden_state_metrics, mean_hidden_state
from semrl_jax.training.update import TokenPass

# Indicators that the pass behind `old_logprobs` gives, and where it has them.
TOKEN_INDICATORS = {"avg_log_probs": "logprobs", "avg_logits_entropy": "entropies"}

MIN_METRIC_TOKENS = 32
MAX_GROUP = 16
MAX_GROUP_ENTRIES = 2**18  # larger responses hide their call's overhead and need the threads


class Measured(NamedTuple):
    """Metrics of one response by name, and the float32 mean of its hidden states."""

    metrics: dict[str, float]
    mean_state: Float[np.ndarray, " D"]


class _Kind(NamedTuple):
    """What the responses of one call have in common."""

    bucket: int
    width: int
    dtype: np.dtype


class _Waiting(NamedTuple):
    hidden_states: Float[np.ndarray, "T D"]
    future: concurrent.futures.Future[Measured]


class Measurer:
    """Runs `hidden_state_metrics` on what arrives.

    Small responses of one bucket and dtype share a call, because a call costs as much as the
    arithmetic of a small one; inside it they are measured one after the other, so that who shares a
    call, and who arrives first, changes no bit. The call has a fixed number of places: `flush` runs
    those that are not full. Thread-safe.

    A future that is cancelled before its call starts is left out; the others of the call are
    measured. `close` waits for the calls that run and cancels all other futures.

    Args:
      max_tokens: response limit; lengths are padded to powers of two from 32 on, and at most to
        it.
      num_threads: calls side by side.
      dataset_stride: responses between two prefixes of a batch; 0 measures no batch.
      device_batch: 0 measures on the host. More: so many responses are decomposed side by side on
        the first local device.
      options: stride, window, method, names and window_growth of `hidden_state_metrics`.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        num_threads: int,
        dataset_stride: int = 0,
        device_batch: int = 0,
        **options,
    ):
        self._max_tokens = max_tokens
        self._pool = concurrent.futures.ThreadPoolExecutor(
            num_threads, thread_name_prefix="metrics"
        )
        self._dataset_stride = dataset_stride
        self._device_batch = device_batch
        self._measure = _compiled(_measure, **options, side_by_side=device_batch > 0)
        self._measure_dataset = _compiled(
            dataset_metrics, **_of_dataset(options), stride=dataset_stride
        )
        self._host = jax.local_devices(backend="cpu")[0]
        self._device = jax.local_devices()[0] if device_batch else self._host
        self._lock = threading.Lock()
        self._waiting: dict[_Kind, list[_Waiting]] = {}
        self._closed = False

    def submit(
        self, hidden_states: Float[np.ndarray, "T D"]
    ) -> concurrent.futures.Future[Measured]:
        """Measures one response of at least one token, soon or at the next `flush`.

        The rows are kept by reference until then: they must not change.

        Raises:
          ValueError: for more than `max_tokens` rows, or a width of 0.
          RuntimeError: after `close`.
        """
        length, width = hidden_states.shape
        if length > self._max_tokens:
            raise ValueError(
                f"hidden_states has {length} tokens; at most max_tokens={self._max_tokens} are "
                "measured: raise max_tokens, or cut the response."
            )
        if width == 0:
            raise ValueError(
                f"hidden_states has shape {hidden_states.shape}; its width D must be at least 1."
            )
        bucket = MIN_METRIC_TOKENS
        while bucket < length:
            bucket *= 2
        bucket = min(bucket, max(self._max_tokens, MIN_METRIC_TOKENS))
        kind = _Kind(bucket, width, hidden_states.dtype)
        item = _Waiting(hidden_states, concurrent.futures.Future())
        with self._lock:
            self._check_open()
            group = self._waiting.setdefault(kind, [])
            group.append(item)
            if len(group) == self._places(kind):
                self._start(kind)
        return item.future

    def flush(self) -> None:
        """Starts measuring whatever has been submitted and not been started."""
        with self._lock:
            for kind in list(self._waiting):
                self._start(kind)

    def submit_batch(
        self, means: Sequence[Float[np.ndarray, " D"]]
    ) -> concurrent.futures.Future[dict[str, float]]:
        """Starts measuring the mean states of measured responses, in their order, as one set.

        The result has `global/<metric>` and `cumulative/<metric>_{velocity,acceleration}`, those
        that are valid; it is empty without a `dataset_stride`, and of no states.
        """
        with self._lock:
            self._check_open()
            return self._pool.submit(self._measure_batch, means)

    def close(self) -> None:
        """Waits for the calls that run, cancels every other future, and refuses new ones."""
        with self._lock:
            self._closed = True
            groups = list(self._waiting.values())
            self._waiting.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for group in groups:
            _cancel(group)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _check_open(self) -> None:
        """Refuses what nobody would measure; the caller holds the lock."""
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
        except BaseException as error:  # belongs to those who wait for the results
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
        return [
            Measured({name: float(value[i]) for name, value in metrics.items()}, means[i])
            for i in range(len(group))
        ]

    def _measure_batch(self, means: Sequence[Float[np.ndarray, " D"]]) -> dict[str, float]:
        if not self._dataset_stride or not means:
            return {}
        rows = np.stack(means)
        with jax.default_device(self._host):
            found = jax.device_get(
                self._measure_dataset(rows, row_mask=np.isfinite(rows).all(axis=1))
            )
        return {
            name: float(value)
            for name, value in found.items()
            if not name.endswith("_valid") and found[f"{name}_valid"]
        }


def token_indicators(
    names: Sequence[str], tokens: TokenPass, mask: Bool[np.ndarray, "B T"]
) -> list[dict[str, float]]:
    """Means over the tokens of each response, nats; out of TOKEN_INDICATORS."""
    found: list[dict[str, float]] = [{} for _ in mask]
    for name in names:
        values = getattr(tokens, TOKEN_INDICATORS[name]).astype(np.float64)
        means = np.mean(values, axis=1, where=mask)
        for metrics, mean in zip(found, means):
            metrics |= {name: float(mean), f"{name}_valid": bool(np.isfinite(mean))}
    return found


def _cancel(group: list[_Waiting]) -> None:
    """Cancels futures whose measuring will not start, and tells those who wait for several."""
    for item in group:
        item.future.cancel()
        item.future.set_running_or_notify_cancel()


@functools.cache
def _compiled(function: Callable, **options: Hashable) -> Callable:
    """The same function for the same options, so that every Measurer finds what one compiled."""
    return jax.jit(functools.partial(function, **options))


def _measure(
    hidden_states: Float[Array, "G T D"], mask: Bool[Array, "G T"], **options
) -> tuple[dict[str, Array], Float[Array, "G D"]]:
    metrics = hidden_state_metrics(hidden_states, mask, **options)
    return metrics, jax.vmap(mean_hidden_state)(hidden_states, mask)


def _of_dataset(options: Mapping) -> dict:
    return {name: value for name, value in options.items() if name in ("window", "method", "names")}
