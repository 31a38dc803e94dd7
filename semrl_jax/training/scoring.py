"""Reward and metrics of each response, started as it arrives, so that both hide behind sampling."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from semrl_jax.metrics import dataset_metrics, hidden_state_metrics, mean_hidden_state
from semrl_jax.rewards import Verdict, VerifierPool
from semrl_jax.types import Rollout

MIN_METRIC_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class ScoredRollout:
    """A rollout with its text and verdict; `rollout.metrics` is filled."""

    rollout: Rollout
    response: str
    reference: str
    verdict: Verdict
    mean_state: Float[np.ndarray, " D"] | None = None

    def with_measured(self, measured: Measured) -> ScoredRollout:
        """The same with metrics in the rollout, and its mean state."""
        rollout = dataclasses.replace(self.rollout, metrics=measured.metrics)
        return dataclasses.replace(self, rollout=rollout, mean_state=measured.mean_state)


class Measured(NamedTuple):
    """Metrics of one response by name, and the float32 mean of its hidden states."""

    metrics: dict[str, float]
    mean_state: Float[np.ndarray, " D"]


class Measurer:
    """Runs `hidden_state_metrics` for one response at a time on host threads.

    One response a call, whatever arrives together: a product's rows are not bitwise the same in
    batches of other sizes, and arrival must not change a number.

    Args:
      max_tokens: response limit; lengths are padded to powers of two below it.
      num_threads: responses measured side by side.
      dataset_stride: responses between two prefixes of a batch; 0 measures no batch.
      options: stride, window, method and names of `hidden_state_metrics`.
    """

    def __init__(self, *, max_tokens: int, num_threads: int, dataset_stride: int = 0, **options):
        self._max_tokens = max_tokens
        self._pool = concurrent.futures.ThreadPoolExecutor(
            num_threads, thread_name_prefix="metrics"
        )
        self._dataset_stride = dataset_stride
        self._measure = jax.jit(functools.partial(_measure, **options))
        self._measure_dataset = jax.jit(
            functools.partial(dataset_metrics, **options | {"stride": dataset_stride})
        )
        self._device = jax.local_devices(backend="cpu")[0]

    def submit(
        self, hidden_states: Float[np.ndarray, "T D"]
    ) -> concurrent.futures.Future[Measured]:
        """Starts measuring one response of at least one token."""
        return self._pool.submit(self._measure_one, hidden_states)

    def submit_batch(
        self, scored: Sequence[ScoredRollout]
    ) -> concurrent.futures.Future[dict[str, float]]:
        """Starts measuring the mean states of measured responses, in their order, as one set.

        The result has `global/<metric>` and `cumulative/<metric>_{velocity,acceleration}`, those
        that are valid; it is empty without a `dataset_stride`.
        """
        return self._pool.submit(self._measure_batch, scored)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _measure_one(self, hidden_states):
        length, width = hidden_states.shape
        bucket = MIN_METRIC_TOKENS
        while bucket < length:
            bucket *= 2
        bucket = min(bucket, max(self._max_tokens, MIN_METRIC_TOKENS))
        padded = np.zeros((1, bucket, width), hidden_states.dtype)
        padded[0, :length] = hidden_states
        mask: Bool[np.ndarray, "1 T"] = np.arange(bucket)[None] < length
        with jax.default_device(self._device):
            metrics, mean = jax.device_get(self._measure(jnp.asarray(padded), jnp.asarray(mask)))
        return Measured({name: float(value[0]) for name, value in metrics.items()}, mean)

    def _measure_batch(self, scored):
        if not self._dataset_stride:
            return {}
        rows = np.stack([item.mean_state for item in scored])
        with jax.default_device(self._device):
            found = jax.device_get(
                self._measure_dataset(rows, row_mask=np.isfinite(rows).all(axis=1))
            )
        return {
            name: float(value)
            for name, value in found.items()
            if not name.endswith("_valid") and found[f"{name}_valid"]
        }


def _measure(
    hidden_states: Float[Array, "1 T D"], mask: Bool[Array, "1 T"], **options
) -> tuple[dict[str, Array], Float[Array, " D"]]:
    metrics = hidden_state_metrics(hidden_states, mask, **options)
    return metrics, mean_hidden_state(hidden_states[0], mask[0])


def score_and_measure(
    rollouts: Iterable[Rollout],
    *,
    decode: Callable[[np.ndarray], str],
    references: Mapping[int, str],
    verifier: VerifierPool,
    measurer: Measurer | None,
    layer: int = -1,
    keep_states: bool = False,
    arrived: Callable[[Rollout], None] = lambda rollout: None,
) -> list[ScoredRollout]:
    """Consumes a stream of rollouts; returns them scored, in (group, sample) order.

    Args:
      rollouts: as they arrive, in any order.
      decode: token ids to text, special tokens left out.
      references: reference answer of each group.
      verifier: scores text against reference.
      measurer: measures the hidden states; None leaves `metrics` empty.
      layer: the layer measured.
      keep_states: keep the hidden states in memory after measuring.
      arrived: called for each rollout, for progress.
    """
    started = []
    for rollout in rollouts:
        response = decode(rollout.response_ids)
        reference = references[rollout.group_id]
        verdict = verifier.submit(response, reference)
        metrics = None
        if measurer is not None:
            plane = rollout.hidden_states[:, rollout.layers.index(layer)]
            metrics = measurer.submit(plane)
        if not keep_states:
            rollout = dataclasses.replace(rollout, hidden_states=None)
        started.append((rollout, response, reference, verdict, metrics))
        arrived(rollout)
    started.sort(key=lambda item: (item[0].group_id, item[0].sample_index))
    scored = []
    for rollout, response, reference, verdict, metrics in started:
        item = ScoredRollout(rollout, response, reference, verdict.result())
        scored.append(item if metrics is None else item.with_measured(metrics.result()))
    return scored
