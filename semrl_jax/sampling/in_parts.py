"""Sampling ahead of the update in parts: later tokens of a response have later weights."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import ml_collections
import numpy as np

from semrl_jax import data
from semrl_jax.cluster.agreement import run_phase
from semrl_jax.data.prompts import Position
from semrl_jax.metrics.measurer import Measurer
from semrl_jax.sampling.exchange import of_all, own_requests
from semrl_jax.sampling.requests import Draw, counter, stream_seed, training_draw, training_options
from semrl_jax.sampling.sampler import Sampler
from semrl_jax.sampling.scoring import Scored, sampled_scalars
from semrl_jax.sampling.source import Sample
from semrl_jax.sampling.splicing import joined, stopped
from semrl_jax.settings.rollout import num_parts, part_tokens
from semrl_jax.support.clock import Clock
from semrl_jax.types import Rollout, SampleRequest


class _Batch(NamedTuple):
    """A batch whose responses are being sampled."""

    step: int
    draw: Draw  # its requests are those of this process
    position: Position  # in the data, after the batch
    rollouts: dict[str, Rollout]  # by sample id, as far as they are sampled


@dataclasses.dataclass
class InParts:
    """Batches of which k are sampled at the same time: a part of each per version of the weights.

    A response of up to N tokens has k parts of ceil(N / k) tokens. Part j of the batch that begins
    with weights w has the j-th version from w on. So the weights change at fixed token indices,
    independent of time. A part is a call of its own, whose prompt ends with the tokens sampled
    before: their keys and values belong to the new weights. Each response is one turn.
    """

    config: ml_collections.ConfigDict
    prompts: data.PromptDataset
    sampler: Sampler
    measurer: Measurer | None

    def __post_init__(self):
        self._batches: list[_Batch] = []  # oldest first

    def next(self, step: int, position: Position, clock: Clock) -> Sample | None:
        """Begins the batch of this step, and samples one part of each batch that is incomplete.

        The step is one more at each call. Batches after the last step of the run do not begin. The
        position in the data is used in the first call. Returns the batch that is complete, or None.
        """
        if step < self.config.training.num_steps:
            self._begin(step, self._batches[-1].position if self._batches else position)
        num_calls = {batch.step: len(self._requests(batch, step)) for batch in self._batches}
        arrived = counter(clock, "sample", sum(num_calls.values()))
        parts: dict[int, list[Rollout]] = {}
        sampler = self.sampler

        def sample_own() -> None:
            missing = [batch for batch in self._batches if batch.step not in parts]
            with (
                sampler.sync.stop.interruptible(),
                concurrent.futures.ThreadPoolExecutor(max(len(missing), 1)) as threads,
            ):
                sample = functools.partial(self._part, newest=step, arrived=arrived)
                calls = {batch.step: threads.submit(sample, batch) for batch in missing}
                concurrent.futures.wait(calls.values())
                # Parts that were sampled are not repeated when another one is.
                parts.update({n: c.result() for n, c in calls.items() if c.exception() is None})
                for call in calls.values():
                    call.result()

        sampler.sync.sampled(sampler.weights, sample_own)
        for batch in self._batches:
            for part in parts[batch.step]:
                before = batch.rollouts.get(part.sample_id)
                whole = part if before is None else self._ended(joined(before, part))
                batch.rollouts[part.sample_id] = whole
        if not self._batches or step - self._batches[0].step + 1 < num_parts(self.config.rollout):
            return None
        batch = self._batches.pop(0)
        scored = self._complete(batch)
        return Sample(scored, batch.position, sampled_scalars(scored, self.config.rollout))

    def _begin(self, step: int, position: Position) -> None:
        count, sampler = self.config.data.prompts_per_step, self.sampler
        examples, position = data.next_prompts(self.prompts, self.config.seed, position, count)
        draw = training_draw(self.config, step, 0, examples)
        own = own_requests(draw.requests, sampler.sampling, sampler.sync.peers.index)
        self._batches.append(_Batch(step, draw._replace(requests=own), position, {}))

    def _requests(self, batch: _Batch, newest: int) -> list[SampleRequest]:
        """The parts to sample while the batch of step `newest` begins."""
        number = newest - batch.step
        num_tokens = number * part_tokens(self.config.rollout)
        if not number:
            return batch.draw.requests
        requests = []
        for request in batch.draw.requests:
            before = batch.rollouts[request.sample_id]
            if before.finish_reason == "length" and len(before.response_ids) == num_tokens:
                requests.append(continued(request, before, number))
        return requests

    def _part(
        self, batch: _Batch, newest: int, arrived: Callable[[Rollout], None]
    ) -> list[Rollout]:
        rollout, found = self.config.rollout, []
        size = part_tokens(rollout)
        before = size * (newest - batch.step)
        limit = min(size, rollout.max_response_tokens - before)
        if requests := self._requests(batch, newest) if limit > 0 else []:
            options = training_options(self.config, self.measurer, batch.step)
            options["min_tokens"] = max(rollout.min_tokens - before, 0)
            calls = self.sampler.generate(requests, max_tokens=limit, **options)
            with contextlib.closing(calls):
                for item in calls:
                    found.append(item)
                    arrived(item)
        return found

    def _ended(self, rollout: Rollout) -> Rollout:
        """Ends it at its first stop string, which may span two parts."""
        if not self.config.rollout.stop_strings:
            return rollout
        return stopped(rollout, self.sampler.token_bytes, self.config.rollout.stop_strings)

    def _complete(self, batch: _Batch) -> Scored:
        """The batch, scored and measured, in every process."""
        options = training_options(self.config, self.measurer, batch.step)
        shared = {name: options[name] for name in ("stop_strings", "measuring", "states")}
        sync = self.sampler.sync

        def score() -> Scored:
            with sync.stop.interruptible():
                return self.sampler.score(batch.rollouts.values(), batch.draw, **shared)

        return of_all(sync.peers, run_phase(sync.peers, "sample", score))


def continued(request: SampleRequest, before: Rollout, part: int) -> SampleRequest:
    """The request for the next part of a response; its random numbers are others."""
    return dataclasses.replace(
        request,
        prompt_ids=np.concatenate([request.prompt_ids, before.response_ids]),
        seed=stream_seed(request.seed, part),
    )
