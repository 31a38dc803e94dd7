"""A replica of this process: its engine is called without a server, a socket or messages."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import grpc
import numpy as np

from semrl_jax.rollout.client.replica import Replica, Responses
from semrl_jax.rollout.engines.base import Engine
from semrl_jax.rollout.server.request_checks import refused_if_invalid, status_of
from semrl_jax.rollout.server.service import Base, RolloutService, check_finite
from semrl_jax.rollout.wire import codec
from semrl_jax.rollout.wire.codec import GenerateCall
from semrl_jax.types import (
    Adapter,
    ReplicaDescription,
    Rollout,
    TensorSpec,
    TensorSum,
    WeightVersion,
)

if TYPE_CHECKING:
    from jax import Array


class CallFailed(grpc.RpcError):
    """The error with which gRPC would end the call."""

    def __init__(self, code: grpc.StatusCode, details: str):
        super().__init__(details)
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return str(self)


class LocalReplica(Replica):
    """A rollout service on an event loop in a daemon thread of this process.

    Rollouts are handed over as the engine made them, and weights from device to device. `close`
    also closes the engine.
    """

    def __init__(self, engine: Engine):
        super().__init__("embedded")
        self._engine = engine
        self._service = RolloutService(engine, replica_id=self.address)
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(
            target=run_loop, args=(self._loop,), name="rollout-replica", daemon=True
        )
        self._thread.start()
        self._submit(engine.start()).result()

    @property
    def name(self) -> str:
        return "the embedded rollout replica"

    def describe(self, timeout_s: float = 0.0, memory=None) -> ReplicaDescription:
        self.description = self._service.describe()
        return self.description

    def compiling(self, timeout_s: float) -> str:
        return self._service.describe().compiling

    def generate(self, call: GenerateCall, timeout_s: float) -> LocalResponses:
        return LocalResponses(self, call)

    async def _rollouts(self, call: GenerateCall) -> AsyncIterator[Rollout]:
        with refused_if_invalid():
            codec.check_call(call, self._service.description)
        async with contextlib.aclosing(self._service.generate(call)) as rollouts:
            async for rollout in rollouts:
                yield dataclasses.replace(rollout, replica_id=self.address)

    def tensor_sums(self, timeout_s: float) -> list[TensorSum]:
        call = self._submit(self._service.tensor_sums())
        return list(_result(call, "TensorSums", timeout_s)[1])

    def take_weights(
        self,
        version: WeightVersion,
        specs: Sequence[TensorSpec],
        arrays: Iterable[tuple[str, np.ndarray | Array]],
        timeout_s: float,
        adapter: Adapter | None = None,
        base: str = "",
    ) -> WeightVersion:
        """Loads and commits all tensors, by name; reads the iterator in the caller's thread.

        Args:
          adapter: the last tensors are its.
          base: a name of the base of the adapter. If the replica holds it, the tensors are the
            adapter's alone.
        """
        held = base if base == self._service.describe().base_digest else ""
        begun: concurrent.futures.Future = concurrent.futures.Future()
        loaded: concurrent.futures.Future = concurrent.futures.Future()
        loaded.set_running_or_notify_cancel()  # the end of the update does not cancel it

        async def receive() -> tuple[WeightVersion, Base | None]:
            update = self._service.check_update(version, specs, adapter, held)
            self._engine.begin_weight_update(update.specs, update.adapter)
            begun.set_result(None)
            check_finite(version.step, await asyncio.wrap_future(loaded))
            return version, Base(base) if base else None

        update = self._submit(self._service.update(receive))
        try:
            concurrent.futures.wait((begun, update), return_when=concurrent.futures.FIRST_COMPLETED)
            if not update.done():
                loaded.set_result(self._engine.load_arrays(arrays))
            return _result(update, "UpdateWeights", timeout_s)
        except BaseException:
            if update.done():  # why the tensors could not be loaded, as after `close`
                _result(update, "UpdateWeights")
            update.cancel()
            raise

    def release(self, weights: bool) -> None:
        self._service.release(weights)

    def close(self, run_id: str = "", attempt_id: str = "") -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._engine.close()

    def _submit(self, work: Coroutine) -> concurrent.futures.Future:
        """Runs it on the loop; RuntimeError once the replica is closed."""
        with self._closing:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RuntimeError("the embedded rollout replica is closed.")


class LocalResponses(Responses):
    """The rollouts of one call."""

    def __init__(self, replica: LocalReplica, call: GenerateCall):
        self.num_bytes: collections.Counter[str] = collections.Counter()
        self._loop = replica._loop
        self._room = asyncio.Semaphore(1)  # the engine waits for the reader, as for a slow client
        self._items: queue.SimpleQueue[Rollout | concurrent.futures.Future] = queue.SimpleQueue()
        self._call = replica._submit(self._forward(replica._rollouts(call)))
        self._call.add_done_callback(self._items.put)

    def __iter__(self) -> Iterator[Rollout]:
        while isinstance(item := self._items.get(), Rollout):
            with contextlib.suppress(RuntimeError):  # the replica was closed
                self._loop.call_soon_threadsafe(self._room.release)
            codec.check_values(item)
            self.num_bytes.update(codec.num_bytes(item))
            self.num_bytes["state_bytes"] += item.num_state_bytes
            yield item
        _result(item, "Generate")

    def cancel(self) -> None:
        self._call.cancel()

    async def _forward(self, rollouts: AsyncIterator[Rollout]) -> None:
        async with contextlib.aclosing(rollouts):
            async for rollout in rollouts:
                await self._room.acquire()
                self._items.put(rollout)


def _result(call: concurrent.futures.Future, method: str, timeout_s: float | None = None):
    """The result of a call; raises CallFailed as the client of a server would see it."""
    try:
        return call.result(timeout_s)
    except concurrent.futures.CancelledError:
        raise CallFailed(grpc.StatusCode.CANCELLED, "the call was cancelled.") from None
    except TimeoutError:
        if call.done():  # the call itself failed so
            raise CallFailed(*status_of(call.exception(), method)) from None
        raise CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
    except Exception as error:
        raise CallFailed(*status_of(error, method)) from error


async def _cancel_all() -> None:
    """Cancels all calls of this loop, and waits for their ends."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Runs a loop until it is stopped, and ends it in its own thread: a notebook's runs a loop."""
    loop.run_forever()
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
