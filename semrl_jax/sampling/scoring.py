"""Rewards and metrics of responses, computed while other responses are being sampled."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import ml_collections
import numpy as np
from jaxtyping import Bool, Float, Int, Num

from semrl_jax.metrics.measurements import Measurement, Metrics, joined
from semrl_jax.metrics.measurer import MAX_HELD_BYTES, Measured, Measurer, join_layers
from semrl_jax.metrics.names import FINAL_LAYER
from semrl_jax.rewards import Verdict, VerifierPool
from semrl_jax.rewards.verdict import episode_verdict
from semrl_jax.support.clock import Clock
from semrl_jax.support.response_files import METRICS, SCORES, SERIES, lengths_of_runs
from semrl_jax.types import TOKEN_ARRAYS, TURN_METRICS, Rollout

UNGRADED = Verdict(0.0, correct=False, boxed=False, extracted=None)
# The tokens in which steps end, of a rollout, its text and numbers of characters.
StepEnds = Callable[[Rollout, str, Sequence[int]], Int[np.ndarray, " N"]]


@dataclasses.dataclass(frozen=True)
class ScoredRollout:
    """A rollout, its text for the verifier, and the verdict."""

    rollout: Rollout
    response: str
    reference: str
    verdict: Verdict
    # Float32, each metric of the response's prefixes; with `evaluation.metric_series`
    series: Mapping[str, Float[np.ndarray, " K"]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Scored(Sequence[ScoredRollout]):
    """B scored responses, and what was measured of them in columns."""

    items: Sequence[ScoredRollout]  # the responses; their rollouts hold no metrics
    metrics: Metrics = dataclasses.field(default_factory=dict)  # [B] values and validities by key
    # Float32 means of the hidden states, of each measured layer; None if a response has none.
    mean_states: Float[np.ndarray, "B L D"] | None = None
    num_dropped: int = 0  # tokens that were sampled for these, and are not trained on

    @classmethod
    def of(cls, items: Sequence[ScoredRollout]) -> Scored:
        """Scored responses, with what the replicas measured moved from the rollouts to columns."""
        rollouts = [item.rollout for item in items]
        plain = [dataclasses.replace(r, metrics={}, mean_state=None) for r in rollouts]
        means = _stacked([rollout.mean_state for rollout in rollouts])
        return cls(
            [dataclasses.replace(item, rollout=r) for item, r in zip(items, plain)],
            joined([(1, rollout.metrics) for rollout in rollouts]),
            None if means is None else means[:, None],
        )

    @classmethod
    def joined(cls, parts: Sequence[Scored]) -> Scored:
        """The responses of all parts, one part after the other."""
        parts = [part for part in parts if part]
        states = [part.mean_states for part in parts]
        return cls(
            [item for part in parts for item in part],
            joined([(len(part), part.metrics) for part in parts]),
            None if not parts or any(s is None for s in states) else np.concatenate(states),
            sum(part.num_dropped for part in parts),
        )

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):
        """A response by its number; several, with their columns, by a slice."""
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        return self.items[index]

    def take(self, rows: Sequence[int] | Int[np.ndarray, " b"]) -> Scored:
        """The responses of these numbers, with their columns."""
        rows = np.asarray(rows, int)
        return Scored(
            [self.items[row] for row in rows],
            {key: Measurement(*(x[rows] for x in found)) for key, found in self.metrics.items()},
            None if self.mean_states is None else self.mean_states[rows],
        )

    def in_order(self) -> Scored:
        order = [(item.rollout.group_id, item.rollout.sample_index) for item in self]
        found = self.take(sorted(range(len(self)), key=order.__getitem__))
        return dataclasses.replace(found, num_dropped=self.num_dropped)

    def with_metrics(self, metrics: Metrics) -> Scored:
        """Adds columns."""
        return dataclasses.replace(self, metrics={**self.metrics, **metrics})

    def with_measured(
        self, measured: Sequence[Measured], turns: Sequence[Sequence[Measured]] = ()
    ) -> Scored:
        """Adds what was measured of each response, and of its turns, see `submit_turns`."""
        items = [
            dataclasses.replace(
                item,
                rollout=dataclasses.replace(
                    item.rollout, effective_ranks=found.effective_ranks, **_turn_metrics(of_turns)
                ),
                series=found.series,
            )
            for item, found, of_turns in zip(self, measured, turns or [()] * len(self), strict=True)
        ]
        metrics = {**self.metrics, **joined([(1, found.metrics) for found in measured])}
        return Scored(items, metrics, _stacked([found.mean_states for found in measured]))

    def columns(
        self, arrays: Sequence[str] = (), text: Callable[[np.ndarray], str] = lambda ids: ""
    ) -> dict[str, list[Any]]:
        """The columns of `support.response_files` that describe responses, not their prompts.

        Args:
          arrays: names of TOKEN_ARRAYS that have a column; an optional one only if it is needed.
          text: of token ids, with special tokens; divides the text of an episode into turns.
        """
        rollouts = [item.rollout for item in self]
        logprobs = [rollout.rollout_logprobs[rollout.response_mask] for rollout in rollouts]
        found = {
            "group_id": [rollout.group_id for rollout in rollouts],
            "sample_index": [rollout.sample_index for rollout in rollouts],
            "reference": [item.reference for item in self],
            "response": [item.response for item in self],
            **verdict_columns([item.verdict for item in self]),
            "finish_reason": [rollout.finish_reason for rollout in rollouts],
            "num_tokens": [rollout.num_policy_tokens for rollout in rollouts],
            "mean_logprob": [float(row.mean()) if len(row) else math.nan for row in logprobs],
        }
        for array in TOKEN_ARRAYS:
            values = [getattr(rollout, array.name) for rollout in rollouts]
            is_left_out = array.is_optional and all(map(array.is_left_out, values))
            if array.name in arrays and not is_left_out:
                found[array.name] = values
        if any(rollout.hint is not None for rollout in rollouts):
            found["hint"] = [rollout.hint for rollout in rollouts]
        if any(rollout.parent is not None for rollout in rollouts):
            # A given response may have the place of a branch.
            found["parent"] = [-1 if r.parent is None else r.parent for r in rollouts]
            found["num_prefix"] = [rollout.num_prefix for rollout in rollouts]
        if "turn_rewards" in found:
            found["turn_characters"] = [_turn_characters(rollout, text) for rollout in rollouts]
        for name in dict.fromkeys(name for item in self for name in item.series):
            found[SERIES + name] = [item.series.get(name) for item in self]
        for key, (values, valid) in self.metrics.items():
            found[METRICS + key.label] = np.where(valid, values.astype(float), np.nan).tolist()
        return found


def num_sampled_tokens(scored: Scored) -> int:
    """Response tokens that the policy sampled."""
    sampled = (item.rollout for item in scored if not item.rollout.is_given)
    kept = sum(int(rollout.response_mask[rollout.num_prefix :].sum()) for rollout in sampled)
    return kept + scored.num_dropped


def mean_of_sampled(values: Num[np.ndarray, "P G"], sampled: Bool[np.ndarray, "P G"]) -> float:
    """The mean over groups of the means of their sampled responses.

    All groups count alike: with `rollout.given_when="failed"`, wrong responses were replaced.
    """
    return float(values.mean(axis=1, where=sampled).mean())


def sampled_scalars(scored: Scored, rollout: ml_collections.ConfigDict) -> dict[str, float]:
    """For the log, if some of the tokens that are sampled for a batch are not in it."""
    if not rollout.hint_rounds and rollout.given_when != "failed":
        return {}
    return {"rollout/num_sampled_tokens": float(num_sampled_tokens(scored))}


def _turn_characters(rollout: Rollout, text: Callable[[np.ndarray], str]) -> list[int]:
    """Characters of each run of the response mask; [] if the parts do not make the whole text."""
    ends = np.cumsum(lengths_of_runs(rollout.response_mask))
    parts = [text(part) for part in np.split(rollout.response_ids, ends[:-1])]
    return [len(part) for part in parts] if "".join(parts) == text(rollout.response_ids) else []


def verdict_columns(verdicts: Sequence[Verdict]) -> dict[str, list[Any]]:
    """Verdicts as columns of `support.response_files`.

    Benchmarks with verifiers of their own have other parts; what a verdict lacks is null.
    """
    names = dict.fromkeys(name for verdict in verdicts for name in verdict.parts)
    return {
        "extracted": [verdict.extracted for verdict in verdicts],
        "correct": [verdict.correct for verdict in verdicts],
        "score": [verdict.score for verdict in verdicts],
        "boxed": [verdict.boxed for verdict in verdicts],
        "verifier_error": [verdict.error for verdict in verdicts],
    } | {SCORES + name: [verdict.parts.get(name) for verdict in verdicts] for name in names}


def submit_turns(
    measurer: Measurer, rollout: Rollout, states: Float[np.ndarray, "_ D"], whole: Future[Measured]
) -> list[Future[Measured]]:
    """Starts measuring each turn of an episode by itself; [] without an environment.

    `states` are of the policy's own tokens. `whole` measures all of them, and so an only turn.
    """
    if rollout.turn_rewards is None:
        return []
    lengths = rollout.turn_lengths
    if len(lengths) == 1:
        return [whole]
    return [measurer.submit(part) for part in np.split(states, np.cumsum(lengths)[:-1])]


def _turn_metrics(turns: Sequence[Measured]) -> dict[str, Float[np.ndarray, " _"]]:
    """The fields of a rollout for what was measured of its turns."""
    found = {}
    for name, key in TURN_METRICS.items():
        columns = [turn.metrics[key] for turn in turns if key in turn.metrics]
        if columns:
            values = [value if valid else math.nan for value, valid in columns]
            found[name] = np.array(values, np.float32)
    return found


def with_steps(item: ScoredRollout, step_ends: StepEnds | None) -> ScoredRollout:
    """Moves the steps of the verdict to the rollout; those that end in one token become one."""
    rollout, steps = item.rollout, item.verdict.steps
    if steps is None:
        return item
    if step_ends is not None:
        places, sums = np.zeros(0, np.int32), np.zeros(0, np.float32)
        if steps and len(rollout.response_ids):
            ends, rewards = zip(*steps)
            ends = step_ends(rollout, item.response, ends)
            places, of_steps = np.unique(ends, return_inverse=True)
            sums = np.bincount(of_steps, rewards).astype(np.float32)
        rollout = dataclasses.replace(rollout, step_ends=places, step_rewards=sums)
    verdict = dataclasses.replace(item.verdict, steps=None)
    return dataclasses.replace(item, rollout=rollout, verdict=verdict)


def _stacked(rows: Sequence[Float[np.ndarray, ...] | None]) -> Float[np.ndarray, "B ..."] | None:
    return np.stack(rows) if rows and all(row is not None for row in rows) else None


def score_and_measure(
    rollouts: Iterable[Rollout],
    *,
    decode: Callable[[Rollout], str],
    references: Mapping[int, str],
    columns: Mapping[int, str] | None = None,
    verifier: VerifierPool | None,
    measurer: Measurer | None,
    step_ends: StepEnds | None = None,
    failure_score: float = 0.0,
    keep_states: bool = False,
    arrived: Callable[[Rollout], None] = lambda rollout: None,
    clock: Clock | None = None,
) -> Scored:
    """Consumes a stream of rollouts in any order; returns them scored, in (group, sample) order.

    Args:
      decode: the text of a response for the verifier.
      references: reference answer by group.
      columns: row of the prompt by group, see `data.PromptExample`; None: no prompt has one.
      verifier: None: no response is graded; all verdicts are `UNGRADED`. An episode has the
        verdict of its environment.
      measurer: measures the hidden states of its layers; None: `metrics` stay as the replica sent
        them. No response is taken while more than MAX_HELD_BYTES wait for it.
      step_ends: the tokens in which steps of a response end; None: rewards of steps are ignored.
      failure_score: of an episode whose environment failed.
      keep_states: whether to keep the hidden states in memory after measuring.
      arrived: called for each rollout, to show progress.
      clock: times the wait for verdicts after the last response.
    """
    started = []
    held: collections.deque[tuple[list[Future[Measured]], int]] = collections.deque()
    num_held = 0  # bytes
    for rollout in rollouts:
        response = decode(rollout)
        reference = references[rollout.group_id]
        verdict: Future[Verdict] | Verdict = UNGRADED
        if rollout.turn_rewards is not None:
            given = rollout.turn_rewards.tolist(), rollout.environment_error
            verdict = episode_verdict(*given, failure_score, rollout.verdicts)
        elif verifier is not None:
            row = (columns or {}).get(rollout.group_id, "")
            verdict = verifier.submit(response, reference, row)
        layers = () if measurer is None else measurer.layers
        states = {layer: rollout.policy_states(layer) for layer in layers}
        metrics = {layer: measurer.submit(rows) for layer, rows in states.items()}
        turns: list[Future[Measured]] = []
        if measurer is not None:
            of_final = states[FINAL_LAYER], metrics[FINAL_LAYER]
            turns = submit_turns(measurer, rollout, *of_final)
            if not keep_states:
                held.append(([*metrics.values(), *turns], rollout.num_state_bytes))
                num_held += rollout.num_state_bytes
        while num_held > MAX_HELD_BYTES:
            measurer.flush()
            measured, num_bytes = held.popleft()
            wait(measured)
            num_held -= num_bytes
        if not keep_states:
            rollout = dataclasses.replace(rollout, hidden_states=None)
        started.append((rollout, response, reference, verdict, metrics, turns))
        arrived(rollout)
    if measurer is not None:
        measurer.flush()
    started.sort(key=lambda item: (item[0].group_id, item[0].sample_index))
    with (clock or Clock())("verify"):
        verdicts = [v if isinstance(v, Verdict) else v.result() for *_, v, _, _ in started]
        items = [ScoredRollout(*item[:3], v) for item, v in zip(started, verdicts, strict=True)]
        scored = Scored.of([with_steps(item, step_ends) for item in items])
    if measurer is None or not scored:
        return scored
    return scored.with_measured(
        [
            join_layers({layer: future.result() for layer, future in metrics.items()})
            for *_, metrics, _ in started
        ],
        [[future.result() for future in turns] for *_, turns in started],
    )
