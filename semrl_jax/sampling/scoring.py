"""Reward and metrics of each response, computed while other responses are being sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from jaxtyping import Float

from semrl_jax.metrics.records import Metrics
from semrl_jax.rewards import Verdict, VerifierPool
from semrl_jax.rollout.measurer import Measured, Measurer, join_layers
from semrl_jax.types import Rollout

UNGRADED = Verdict(0.0, correct=False, boxed=False, extracted=None)


@dataclasses.dataclass(frozen=True)
class ScoredRollout:
    """A rollout, its text for the verifier, and the verdict.

    `mean_states` are float32 means of the hidden states, one row per measured layer.
    """

    rollout: Rollout
    response: str
    reference: str
    verdict: Verdict
    mean_states: Float[np.ndarray, "L D"] | None = None

    def with_measured(self, measured: Measured) -> ScoredRollout:
        """Adds what was measured of the rollout."""
        rollout = dataclasses.replace(
            self.rollout,
            metrics={**self.rollout.metrics, **measured.metrics},
            effective_ranks=measured.effective_ranks,
        )
        return dataclasses.replace(self, rollout=rollout, mean_states=measured.mean_states)

    def with_metrics(self, metrics: Metrics) -> ScoredRollout:
        """Adds metrics to the rollout."""
        metrics = {**self.rollout.metrics, **metrics}
        return dataclasses.replace(self, rollout=dataclasses.replace(self.rollout, metrics=metrics))


def score_and_measure(
    rollouts: Iterable[Rollout],
    *,
    decode: Callable[[np.ndarray], str],
    references: Mapping[int, str],
    columns: Mapping[int, str] | None = None,
    verifier: VerifierPool | None,
    measurer: Measurer | None,
    keep_states: bool = False,
    arrived: Callable[[Rollout], None] = lambda rollout: None,
) -> list[ScoredRollout]:
    """Consumes a stream of rollouts; returns them scored, in (group, sample) order.

    Args:
      rollouts: in any order.
      decode: converts the token ids of a response to the text for the verifier.
      references: reference answer by group.
      columns: row of the prompt by group, see `data.PromptExample`; None: no prompt has one.
      verifier: None: no response is graded; all verdicts are `UNGRADED`.
      measurer: measures the hidden states of its layers; None: `metrics` stay as the replica sent
        them.
      keep_states: whether to keep the hidden states in memory after measuring.
      arrived: called for each rollout, to show progress.
    """
    started = []
    for rollout in rollouts:
        response = decode(rollout.response_ids)
        reference = references[rollout.group_id]
        verdict = None
        if verifier is not None:
            row = (columns or {}).get(rollout.group_id, "")
            verdict = verifier.submit(response, reference, row)
        layers = () if measurer is None else measurer.layers
        metrics = {layer: measurer.submit(rollout.policy_states(layer)) for layer in layers}
        if not keep_states:
            rollout = dataclasses.replace(rollout, hidden_states=None)
        started.append((rollout, response, reference, verdict, metrics))
        arrived(rollout)
    if measurer is not None:
        measurer.flush()
    started.sort(key=lambda item: (item[0].group_id, item[0].sample_index))
    scored = []
    for rollout, response, reference, verdict, metrics in started:
        means = None if rollout.mean_state is None else rollout.mean_state[None]
        found = UNGRADED if verdict is None else verdict.result()
        item = ScoredRollout(rollout, response, reference, found, means)
        if metrics:
            measured = {layer: future.result() for layer, future in metrics.items()}
            item = item.with_measured(join_layers(measured))
        scored.append(item)
    return scored
