"""Reward and metrics of each response, started as it arrives, so that both hide behind sampling."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from semrl_jax.metrics import hidden_state_metrics
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

    def with_metrics(self, metrics: Mapping[str, float]) -> ScoredRollout:
        """The same with these metrics in the rollout."""
        rollout = dataclasses.replace(self.rollout, metrics=metrics)
        return dataclasses.replace(self, rollout=rollout)


class Measurer:
    """Runs `hidden_state_metrics` for one response at a time on host threads.

    One response a call, whatever arrives together: a product's rows are not bitwise the same in
    batches of other sizes, and arrival must not change a number.

    Args:
      max_tokens: response limit; lengths are padded to powers of two below it.
      num_threads: responses measured side by side.
      options: stride, window, method and names of `hidden_state_metrics`.
    """

    def __init__(self, *, max_tokens: int, num_threads: int, **options):
        self._max_tokens = max_tokens
        self._pool = concurrent.futures.ThreadPoolExecutor(
            num_threads, thread_name_prefix="metrics"
        )
        self._measure = jax.jit(functools.partial(hidden_state_metrics, **options))
        self._device = jax.local_devices(backend="cpu")[0]

    def submit(
        self, hidden_states: Float[np.ndarray, "T D"]
    ) -> concurrent.futures.Future[dict[str, float]]:
        """Starts measuring one response of at least one token."""
        return self._pool.submit(self._measure_one, hidden_states)

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
            metrics = jax.device_get(self._measure(jnp.asarray(padded), jnp.asarray(mask)))
        return {name: float(value[0]) for name, value in metrics.items()}


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
        scored.append(item if metrics is None else item.with_metrics(metrics.result()))
    return scored
