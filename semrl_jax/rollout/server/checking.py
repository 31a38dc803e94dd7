"""Checks the tensors of a weight update in threads, and lets the engine load them."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from semrl_jax.rollout.wire import codec
from semrl_jax.support.cores import usable_cores
from semrl_jax.types import TensorSpec

_NUM_THREADS = min(usable_cores(), 4)
_MAX_BATCHES = _NUM_THREADS + 8  # waiting and running; then the sender waits
_BLOCK_BYTES = 1 << 20  # copied or hashed, and checked while it is in the cache
BATCH_BYTES = 8 << 20  # many small tensors would cost more in messages than in work


class Checked(NamedTuple):
    """What was found of a tensor."""

    # None for bytes in the client's memory. There, the client has hashed the same pages, and leaves
    # them unchanged until the update has ended.
    checksum: bytes | None
    is_finite: bool  # whether all values are


class Complete(NamedTuple):
    """A tensor all of whose bytes have come."""

    spec: TensorSpec
    buffer: UInt8[np.ndarray, " bytes"]  # the memory that the engine loads it from
    source: UInt8[np.ndarray, " bytes"] | None = None  # the client's memory, to copy into `buffer`
    was_sent: bool = False  # over the wire


class TensorChecks:
    """One update's checks; `close` it.

    `load` is called in the threads, with the names of tensors that are checked.
    """

    def __init__(self, load: Callable[[Sequence[str]], None]):
        self._load = load
        self._pool = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "weights")
        self._running: set[asyncio.Future] = set()
        self._checked: dict[str, Checked] = {}
        self._batch: list[Complete] = []

    async def add(self, tensor: Complete) -> None:
        """Starts the check soon. Waits while too many run."""
        self._batch.append(tensor)
        if sum(each.spec.num_bytes for each in self._batch) >= BATCH_BYTES:
            await self._start()

    async def results(self) -> Mapping[str, Checked]:
        """The results by name, when all tensors are checked and loaded."""
        await self._start()
        while self._running:
            await self._wait()
        return self._checked

    async def close(self) -> None:
        """No tensor is loaded after it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._batch.clear()
        if self._running:
            await asyncio.wait(self._running)

    async def _start(self) -> None:
        while len(self._running) >= _MAX_BATCHES:
            await self._wait()
        batch, self._batch = self._batch, []
        if batch:
            loop = asyncio.get_running_loop()
            self._running.add(loop.run_in_executor(self._pool, self._check, batch))

    async def _wait(self) -> None:
        done, self._running = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        for batch in done:
            self._checked |= batch.result()

    def _check(self, batch: Sequence[Complete]) -> dict[str, Checked]:
        found = {tensor.spec.name: _check(tensor) for tensor in batch}
        self._load(tuple(found))
        return found


def _check(tensor: Complete) -> Checked:
    checksum, is_finite = codec.checksum() if tensor.was_sent else None, True
    for start in range(0, tensor.spec.num_bytes, _BLOCK_BYTES):
        block = tensor.buffer[start : start + _BLOCK_BYTES]
        if tensor.source is not None:
            block[:] = tensor.source[start : start + _BLOCK_BYTES]
        if checksum is not None:
            checksum.update(block)
        is_finite = is_finite and codec.are_finite(block, tensor.spec.dtype)
    return Checked(checksum and checksum.digest(), is_finite)
