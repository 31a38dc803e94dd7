"""Where the batches of a run come from: when they are sampled, and with which weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import ml_collections
import numpy as np
from jaxtyping import Bool

from semrl_jax import data, models
from semrl_jax.data.prompts import Position
from semrl_jax.metrics.measurer import Measurer
from semrl_jax.sampling.episodes import Episodes
from semrl_jax.sampling.hints import Hints
from semrl_jax.sampling.requests import counter, training_draw, training_options
from semrl_jax.sampling.sampler import Sampler
from semrl_jax.sampling.scoring import Scored, sampled_scalars
from semrl_jax.support.clock import Clock
from semrl_jax.types import SampleRequest


class Sample(NamedTuple):
    """The responses of one training step."""

    scored: Scored  # B = P * G, in (group, sample) order
    position: Position  # (epoch, prompts taken of it) after this step
    scalars: dict[str, float]  # all that the log says about the sampling, apart from the responses

    def with_scalars(self, scalars: Mapping[str, float]) -> Sample:
        return self._replace(scalars=self.scalars | scalars)


@runtime_checkable
class Source(Protocol):
    """Gives the batch of each step. All processes call its methods together.

    What it returns for a step follows from the config, the weights, the step and the position, and
    not from time. A resumed run therefore gets the same batches.
    """

    def offer(self, weights: Sequence[models.Params], step: int) -> None:
        """Gives the weights of this step, the last of `weights`.

        Those before are of the steps that sampled batches which are not trained on yet, before step
        0 those of step 0. Only a source that starts in the middle of a run uses them.
        """

    def next(self, step: int, position: Position, clock: Clock) -> Sample:
        """The batch of this step, after `offer`; `position` in the data is after the last step."""


@runtime_checkable
class Batches(Protocol):
    """What a source samples, one batch after the other, with the weights that it has sent."""

    def next(self, step: int, position: Position, clock: Clock) -> Sample | None:
        """Begins the batch of this step; returns the batch that is complete now, or None."""


@dataclasses.dataclass
class Now:
    """A source whose batches have the weights of their own step."""

    sampler: Sampler
    batches: Batches

    def offer(self, weights: Sequence[models.Params], step: int) -> None:
        self.sampler.sync_weights(weights[-1], step)

    def next(self, step: int, position: Position, clock: Clock) -> Sample:
        with clock("sample"):
            sample = self.batches.next(step, position, clock)
        self.sampler.release_weights(clock)  # the update needs the memory; `offer` sends new ones
        return sample


@dataclasses.dataclass
class Counted:
    """A source whose samples also have what was counted since the one before."""

    source: Source
    counts: Sequence[Callable[[], dict[str, float]]]  # each returns scalars since its last call
    _began: bool = False

    def offer(self, weights: Sequence[models.Params], step: int) -> None:
        if not self._began:
            self._count()  # the counts of the setup belong to no step
            self._began = True
        self.source.offer(weights, step)

    def next(self, step: int, position: Position, clock: Clock) -> Sample:
        sample = self.source.next(step, position, clock)
        return sample.with_scalars(self._count())

    def _count(self) -> dict[str, float]:
        return {name: value for count in self.counts for name, value in count().items()}


@dataclasses.dataclass
class Rounds:
    """Batches that are sampled in one round: the next P prompts, with G whole responses each."""

    config: ml_collections.ConfigDict
    prompts: data.PromptDataset
    sampler: Sampler
    measurer: Measurer | None
    episodes: Episodes | None = None  # in place of the sampler's, which evaluations have

    def next(self, step: int, position: Position, clock: Clock) -> Sample:
        scored = self.sample_round(step, 0, position, clock, "sample")
        after = self.after(position, self.config.data.prompts_per_step)
        scalars = sampled_scalars(scored, self.config.rollout)
        return self.counted(Sample(scored, after, scalars), [self.correct(scored)], position)

    def sample_round(
        self, step: int, number: int, position: Position, clock: Clock, what: str
    ) -> Scored:
        """The responses to P prompts, scored and measured as they arrive.

        Args:
          number: of the round in its step, from 0. Round n skips n * P prompts after `position`.
          position: in the data, before the step.
          what: text that is shown before the number of responses that have arrived.
        """
        examples = [self.prompts.examples[row] for row in self._rows(position, number)]
        draw = training_draw(self.config, step, number, examples)

        def sample(requests: Sequence[SampleRequest]) -> Scored:
            return self.sampler.sample(
                requests,
                draw.references,
                columns=draw.columns,
                given=draw.given,
                clock=clock,
                episodes=self.episodes,
                arrived=counter(clock, what, len(requests), already=number),
                **training_options(self.config, self.measurer, step),
            )

        scored = sample(draw.requests)
        if not self.config.rollout.hint_rounds:
            return scored
        by_group = dict(zip(draw.references, examples, strict=True))
        hints = Hints(self.config, self.sampler.tokenizer)
        return hints.answered(scored, draw, by_group, sample)

    def after(self, position: Position, count: int) -> Position:
        """The position after this many prompts."""
        return data.advanced(self.prompts, position, count)

    def correct(self, scored: Scored) -> Bool[np.ndarray, "P G"]:
        """Which responses of a round are correct."""
        found = [item.verdict.correct for item in scored]
        return np.array(found, bool).reshape(-1, self.config.rollout.group_size)

    def counted(
        self, sample: Sample, correct: Sequence[Bool[np.ndarray, "P G"]], start: Position
    ) -> Sample:
        """For a curriculum: the sample with what its rounds, which began at `start`, have shown."""
        seen = sample.position.seen
        if seen is None:
            return sample
        for number, of_round in enumerate(correct):
            seen = seen.after(self._rows(start, number), of_round)
        visited = seen.visits > 0
        scalars = {
            "curriculum/visited_fraction": float(visited.mean()),
            "curriculum/correct_fraction": float(seen.rates[visited].mean()),
        }
        sample = sample._replace(position=sample.position._replace(seen=seen))
        return sample.with_scalars(scalars)

    def _rows(self, position: Position, number: int) -> list[int]:
        """The prompts of round `number` of the step that begins at `position`."""
        count = self.config.data.prompts_per_step
        start = self.after(position, number * count)
        return data.next_rows(self.prompts, self.config.seed, start, count)
