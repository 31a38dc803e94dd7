"""Makes calls of the service from the requests of many clients.

An engine that takes calls one after the other gets all requests that wait and that are sampled
alike in one call. Another engine gets each at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import numpy as np

from semrl_jax.rollout.engines.base import EngineDeadError
from semrl_jax.rollout.server.request_checks import refused_if_invalid
from semrl_jax.rollout.server.service import RolloutService
from semrl_jax.rollout.wire import codec
from semrl_jax.types import HiddenStateParams, MetricParams, Rollout, SampleRequest, SamplingParams

GATHER_S = 0.004  # a call waits as long for a further request, if one has come in this time
MAX_GATHERS = 50


class How(NamedTuple):
    """How responses are sampled; those of one call have the same."""

    sampling: SamplingParams
    metrics: MetricParams | None = None
    is_streamed: bool = False
    prompt_logprobs: bool = False


class Job:
    """One response that was asked for."""

    def __init__(self, request: SampleRequest, how: How):
        self.request, self.how = request, how
        self.rollout: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        self._tokens: asyncio.Queue[Sequence[int] | None] = asyncio.Queue()
        self.rollout.add_done_callback(lambda _: self._tokens.put_nowait(None))

    async def tokens(self) -> AsyncIterator[Sequence[int]]:
        """The token ids of a streamed response as they are sampled, then all that were not sent."""
        num_sent = 0
        while (new := await self._tokens.get()) is not None:
            num_sent += len(new)
            yield new
        yield (await self.rollout).response_ids[num_sent:].tolist()

    def add(self, token_ids: Sequence[int]) -> None:
        self._tokens.put_nowait(token_ids)


class Calls:
    """The calls that a server of HTTP makes. Bound to one event loop."""

    def __init__(self, service: RolloutService):
        self._service = service
        self._joins = service.description.calls_at_once == 1
        self._waiting: list[Job] = []
        self._tasks: set[asyncio.Task] = set()
        self._worker: asyncio.Task | None = None
        self._ids = itertools.count()

    @contextlib.asynccontextmanager
    async def sampled(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], how: How
    ) -> AsyncIterator[list[Job]]:
        """Asks for a response of each prompt and each of its seeds; at the exit nobody waits.

        Raises Refused if the service would not take them.
        """
        call = next(self._ids)
        prompts = [np.array(ids, np.int32) for ids in prompts]
        jobs = [
            Job(SampleRequest(f"{call}-{i}-{j}", i, j, prompt, seed), how)
            for i, (prompt, own) in enumerate(zip(prompts, seeds, strict=True))
            for j, seed in enumerate(own)
        ]
        with refused_if_invalid():
            codec.check_call(self._call(jobs), self._service.description)
        if not self._joins:
            self._start(jobs)
        else:
            self._waiting += jobs
            if self._worker is None or self._worker.done():
                self._worker = asyncio.create_task(self._work())
        try:
            yield jobs
        finally:
            for job in jobs:
                if not job.rollout.cancel() and not job.rollout.cancelled():
                    job.rollout.exception()  # else asyncio logs one that nobody asked for

    def _call(self, jobs: Sequence[Job]) -> codec.GenerateCall:
        loop, how = asyncio.get_running_loop(), jobs[0].how
        by_id = {job.request.sample_id: job for job in jobs}

        def on_tokens(sample_id: str, token_ids: Sequence[int]) -> None:
            loop.call_soon_threadsafe(by_id[sample_id].add, token_ids)

        return codec.GenerateCall(
            tuple(job.request for job in jobs),
            how.sampling,
            HiddenStateParams(),
            None,
            how.metrics,
            on_tokens=on_tokens if how.is_streamed else None,
            prompt_logprobs=how.prompt_logprobs,
        )

    async def _work(self) -> None:
        """Makes a call of those that wait and are sampled like the first, until none waits."""
        while self._waiting:
            count = 0
            for _ in range(MAX_GATHERS):
                if count == len(self._waiting):
                    break
                count = len(self._waiting)
                await asyncio.sleep(GATHER_S)
            waiting = [job for job in self._waiting if not job.rollout.done()]
            chosen = [job for job in waiting if job.how == waiting[0].how]
            chosen = chosen[: self._service.description.max_prompts]
            taken = set(chosen)
            self._waiting = [job for job in waiting if job not in taken]
            if chosen:
                await asyncio.wait([self._start(chosen)])

    def _start(self, jobs: Sequence[Job]) -> asyncio.Task:
        task = asyncio.create_task(self._run(jobs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        left = len(jobs)

        def ended(rollout: asyncio.Future[Rollout]) -> None:
            nonlocal left
            left -= 1
            if not left and rollout.cancelled():  # nobody waits for the rest
                task.cancel()

        for job in jobs:
            job.rollout.add_done_callback(ended)
        return task

    async def _run(self, jobs: Sequence[Job]) -> None:
        by_id = {job.request.sample_id: job.rollout for job in jobs}
        try:
            async with contextlib.aclosing(self._service.generate(self._call(jobs))) as rollouts:
                async for rollout in rollouts:
                    if not by_id[rollout.sample_id].done():
                        by_id[rollout.sample_id].set_result(rollout)
        except Exception as error:  # each client is told
            if isinstance(error, EngineDeadError):
                self._service.dead.set()
            for future in by_id.values():
                if not future.done():
                    future.set_exception(error)
