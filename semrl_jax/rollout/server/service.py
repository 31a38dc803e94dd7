"""The rollout service: checks every request and keeps weight updates apart from generation."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import importlib.util
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import grpc
import numpy as np
from jaxtyping import UInt8

from semrl_jax.metrics import METRICS
from semrl_jax.rollout.engines.base import Engine
from semrl_jax.rollout.server.checking import Complete, TensorChecks
from semrl_jax.rollout.server.counts import Counts
from semrl_jax.rollout.server.request_checks import Refused, refused_if_invalid
from semrl_jax.rollout.wire import bounds, codec
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.rollout.wire.shared_memory import layout, open_memory
from semrl_jax.support import compilation
from semrl_jax.types import (
    Adapter,
    HiddenStateParams,
    ReplicaDescription,
    Rollout,
    TensorSpec,
    TensorSum,
    WeightVersion,
    manifest_digest,
)

_log = logging.getLogger(__name__)


class Base(NamedTuple):
    """The tensors that the adapters of an update belong to."""

    digest: str  # identity; for weights from a server's client, of their manifest
    specs: Sequence[TensorSpec] = ()
    checksums: Sequence[bytes] = ()


class Update(NamedTuple):
    """A checked announcement of weights."""

    specs: tuple[TensorSpec, ...]  # of what comes
    adapter: Adapter | None  # whose tensors are the last ones
    base: Base | None  # stays, if only the adapter comes


class RolloutService:
    """Serves one engine; bound to one event loop.

    A Generate call starts only if the replica serves exactly the weights that the call names. A
    commit waits for the end of running calls, and new calls for the commit. The replica belongs to
    the run of its first committed update. If a call asks for metrics, the service measures the
    engine's responses itself.

    Args:
      engine: samples the responses; the service does not close it.
      replica_id: unique name of this process.
      stall_timeout_s: a client that reads no message for this long loses its call. The sender of a
        weight update has twice this time per message: it may itself wait for another replica.
    """

    def __init__(self, engine: Engine, *, replica_id: str, stall_timeout_s: float = 600.0):
        self.dead = asyncio.Event()  # set once the engine has died
        self.counts = Counts()
        self._engine = engine
        self._stall_timeout_s = stall_timeout_s
        description = engine.describe()
        measures = -1 in description.layers and importlib.util.find_spec("jax")
        # What `Describe` says, without the weights.
        self.description: ReplicaDescription = dataclasses.replace(
            description,
            protocol_major=codec.PROTOCOL_MAJOR,
            protocol_minor=codec.PROTOCOL_MINOR,
            replica_id=replica_id,
            metric_kinds=METRICS if measures else (),
        )
        self._version: WeightVersion | None = None
        self._base: Base | None = None  # in the weights, if these have an adapter
        self._owner: tuple[str, str] | None = None  # run and attempt that sent the weights
        self._running: set[asyncio.Event] = set()  # one per Generate call, set at its end
        self._gate = asyncio.Event()  # closed while weights are committed
        self._gate.set()
        self._updating = False
        self._commit_task: asyncio.Task | None = None
        self._num_aborted = 0
        self._num_pausing = 0  # Pause calls that wait

    def request_readers(self) -> dict[str, bounds.Reader]:
        """The reader of each method's requests, by the method's path."""
        readers = bounds.request_readers(self.description, self._engine.expected_tensors())
        return {f"/{codec.SERVICE_NAME}/{name}": reader for name, reader in readers.items()}

    def describe(self) -> ReplicaDescription:
        """What the replica is, serves and compiles now."""
        return dataclasses.replace(
            self.description,
            version=self._version,
            compiling=compilation.current(),
            base_digest=self._base.digest if self._base else "",
            is_free=self._owner is None,
        )

    async def generate(self, call: codec.GenerateCall) -> AsyncIterator[Rollout]:
        """Yields each response of a call that was checked; `aclose` ends the others."""
        async with self._admitted(call.version) as version:
            call = call._replace(version=version)
            with self._counted(len(call.requests)) as count:
                async with contextlib.aclosing(await self._responses(call)) as rollouts:
                    async for rollout in rollouts:
                        self._num_aborted += rollout.finish_reason == "aborted"
                        yield rollout
                        count(rollout)

    async def update(
        self, receive: Callable[[], Awaitable[tuple[WeightVersion, Base | None]]]
    ) -> WeightVersion:
        """Stages weights with `receive` and commits them.

        `receive` returns their version, and their base if an adapter belongs to it.
        """
        if self._updating:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "another weight update is running.")
        self._updating = True
        started = paused = time.monotonic()
        try:
            version, base = await receive()
            paused = time.monotonic()
            self._gate.clear()
            await _all_set(self._running)
        except BaseException:
            self._engine.abort_weight_update()
            self._end_update("failed", started, paused)
            raise
        # In a separate task: a commit that has begun is completed even if the caller is gone.
        self._commit_task = asyncio.create_task(self._commit(version, base, started, paused))
        await asyncio.shield(self._commit_task)
        return version

    async def tensor_sums(self) -> tuple[WeightVersion, Sequence[TensorSum]]:
        """The version that is served, and the sums of its tensors; none is committed meanwhile."""
        async with self._admitted(None) as version:
            with refused_if_invalid():
                return version, await self._engine.tensor_sums()

    def release(self, weights: bool) -> None:
        """Frees what the engine keeps; without weights, calls are refused until new ones come."""
        if weights:
            self._version = self._base = None
        self._engine.release(weights)

    async def sleep(self, run_id: str) -> str:
        """Frees weights and caches once running calls have ended; the next `update` ends the sleep.

        Returns why the engine freed nothing, or "".
        """
        self._check_run(run_id, "does not sleep for")
        if self._commit_task is not None:  # of a trainer that was killed, perhaps
            await asyncio.wait([self._commit_task])
        if self._updating:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "a weight update is running.")
        self._updating = True

        async def fall_asleep() -> str:
            self._gate.clear()
            try:
                await _all_set(self._running)
                self._version = self._base = None  # first: a failure may have freed a part
                with refused_if_invalid():
                    return await self._engine.sleep()
            finally:
                self._updating = False
                self._gate.set()

        # It is completed even if the caller is gone, like a commit.
        self._commit_task = asyncio.create_task(fall_asleep())
        return await asyncio.shield(self._commit_task)

    def _check_run(self, run_id: str, refuses: str) -> None:
        if self._owner and run_id != self._owner[0]:
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                f"the replica belongs to run {self._owner[0]!r}; it {refuses} run {run_id!r}. It "
                "is handed over when that run ends; if the run was killed, restart the replica.",
            )

    async def load(
        self,
        version: WeightVersion,
        tensors: Callable[[str], Iterable[tuple[TensorSpec, np.ndarray]]],
    ) -> WeightVersion:
        """Serves weights that this process reads, without a client.

        Args:
          version: whose digest is not read.
          tensors: all tensors of a dtype, in the engine's order. Read in a thread.

        Returns:
          The version with its digest.
        """
        specs = self._engine.expected_tensors()

        async def receive() -> tuple[WeightVersion, None]:
            buffers, checksums = self._engine.begin_weight_update(specs), []

            def fill() -> None:
                for spec, array in tensors(specs[0].dtype):
                    data = codec.as_bytes(array)
                    buffers[spec.name][:] = data
                    checksums.append(codec.checksum(data).digest())
                    self._engine.load_tensors([spec.name])

            await asyncio.to_thread(fill)
            return dataclasses.replace(version, digest=manifest_digest(specs, checksums)), None

        return await self.update(receive)

    def check_update(
        self,
        begin: pb.BeginUpdate | WeightVersion,
        tensors: Sequence[pb.TensorSpec | TensorSpec],
        adapter: pb.Adapter | Adapter | None = None,
        base_digest: str = "",
    ) -> Update:
        """What an update consists of; raises Refused if the replica cannot take it."""
        for field in ("run_id", "attempt_id"):
            if not 0 < len(getattr(begin, field)) <= codec.MAX_NAME_LENGTH:
                raise _invalid(f"begin.{field} needs 1 to {codec.MAX_NAME_LENGTH} characters.")
        if begin.step < 0:
            raise _invalid(f"begin.step={begin.step} must be at least 0.")
        self._check_run(begin.run_id, "refuses weights of")
        expected, base, decoded = self._engine.expected_tensors(), None, None
        with refused_if_invalid():
            if adapter is not None:
                limit = self.description.max_adapter_rank
                decoded = codec.decode_adapter(adapter, self._engine.adapter_modules(), limit)
                own = decoded.specs(expected)
                expected = own if base_digest else [*expected, *own]
            specs = codec.decode_specs(tensors, expected)
        if adapter is None and base_digest:
            raise _invalid("begin.base_digest is only for adapters.")
        if base_digest:
            base = self._base
            if base is None or base.digest != base_digest:
                raise Refused(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"the replica does not hold the base {base_digest[:12]!r} of this adapter.",
                )
        return Update(specs, decoded, base)

    async def Describe(self, request, context) -> pb.DescribeResponse:
        description = dataclasses.replace(self.describe(), reads_memory=_is_readable(request))
        return codec.encode_description(description)

    async def Generate(self, call: codec.GenerateCall, context) -> None:
        async with contextlib.aclosing(self.generate(call)) as rollouts:
            async for rollout in rollouts:
                for message in codec.encode_rollout(rollout):
                    # Waits for a slow client, so that at most one response is held for it.
                    await self._write(context, message)

    async def UpdateWeights(
        self, request_iterator: AsyncIterator[codec.WeightMessage], context
    ) -> pb.UpdateWeightsResponse:
        version = await self.update(functools.partial(self._receive_weights, request_iterator))
        return pb.UpdateWeightsResponse(version=codec.encode_version(version))

    async def TensorSums(self, request, context) -> pb.TensorSumsResponse:
        return codec.encode_sums(*await self.tensor_sums())

    async def Sleep(self, request, context) -> pb.SleepResponse:
        return pb.SleepResponse(remark=await self.sleep(request.run_id))

    async def HandOver(self, request, context) -> pb.HandOverResponse:
        if self._owner == (request.run_id, request.attempt_id):
            self._owner = None
        return pb.HandOverResponse()

    async def Pause(self, request, context) -> pb.PauseResponse:
        self.counts.is_paused = True
        self._num_pausing += 1
        try:
            await _all_set(self._running)
        except BaseException:
            self.counts.is_paused = self._num_pausing > 1  # another call still wants it
            raise
        finally:
            self._num_pausing -= 1
        return pb.PauseResponse(version=self._encoded_version())

    async def Resume(self, request, context) -> pb.ResumeResponse:
        self.counts.is_paused = False
        return pb.ResumeResponse(version=self._encoded_version())

    async def Abort(self, request, context) -> pb.AbortResponse:
        running, before = tuple(self._running), self._num_aborted
        if running:
            self.counts.aborts += 1
            await self._engine.abort()
            await _all_set(running)
        return pb.AbortResponse(
            num_aborted=self._num_aborted - before, version=self._encoded_version()
        )

    async def _write(self, context, message: pb.GenerateResponse | bytes) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await context.write(message)
        except TimeoutError:
            raise _stalled("took no message", self._stall_timeout_s) from None

    async def _next(self, messages: AsyncIterator[codec.WeightMessage], kind: str, what: str = ""):
        """The payload of the next message, which must be of `kind`: begin, chunk or commit."""
        timeout_s = 2 * self._stall_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                message = await anext(messages)
        except StopAsyncIteration:
            raise _invalid(f"the stream ended where a {kind} {what} was due.") from None
        except TimeoutError:
            raise _stalled(f"sent no {kind}", timeout_s) from None
        if message.kind != kind:
            raise _invalid(f"a {message.kind} came where a {kind} {what} was due.")
        return message.payload

    async def _responses(self, call: codec.GenerateCall) -> AsyncIterator[Rollout]:
        """The engine's responses, measured if the call asks for metrics."""
        states = call.hidden_states
        kept = states.kinds if states.layers else ()
        if call.metrics is None:
            return self._engine.generate(call)
        if not kept:
            states = HiddenStateParams((-1,), call.metrics.dtype)
        elif "decode" not in kept:
            states = dataclasses.replace(states, kinds=("decode", *kept))
        # In a thread: the first import loads JAX, which takes seconds.
        measurer = await asyncio.to_thread(importlib.import_module, "semrl_jax.metrics.measurer")
        return measurer.measure_each(
            self._engine.generate(call._replace(hidden_states=states)),
            call.metrics,
            max_tokens=call.sampling.max_tokens,
            keep_states="decode" in kept,
        )

    def _encoded_version(self) -> pb.WeightVersion | None:
        return codec.encode_version(self._version) if self._version else None

    @contextlib.asynccontextmanager
    async def _admitted(self, version: WeightVersion | None) -> AsyncIterator[WeightVersion]:
        """Admits a Generate call for `version`, or for the one that is served, and yields it.

        The call counts as running until it ends.
        """
        self.counts.waiting += 1
        try:
            while not self._gate.is_set():
                await self._gate.wait()
        finally:
            self.counts.waiting -= 1
        if self.counts.is_paused:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the replica is paused; resume it.")
        if self._version is None and version is None:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the replica has no weights yet.")
        if version is not None and self._version != version:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the replica serves weights {self._version}, not {version}; sync weights first.",
            )
        ended = asyncio.Event()
        self._running.add(ended)
        try:
            yield self._version
        finally:
            self._running.discard(ended)
            ended.set()

    @contextlib.contextmanager
    def _counted(self, num_responses: int) -> Iterator[Callable[[Rollout], None]]:
        """Counts a call while it runs; yields a function that counts a response that was sent."""
        counts, num_left = self.counts, num_responses

        def count(rollout: Rollout) -> None:
            nonlocal num_left
            num_left -= 1
            counts.unfinished -= 1
            counts.add(rollout)

        counts.running += 1
        counts.unfinished += num_responses
        try:
            yield count
        finally:
            counts.running -= 1
            counts.unfinished -= num_left

    async def _receive_weights(
        self, messages: AsyncIterator[codec.WeightMessage]
    ) -> tuple[WeightVersion, Base | None]:
        """Fills the engine's staging buffers; see `update`."""
        begin = await self._next(messages, "begin")
        sent = begin.adapter if begin.HasField("adapter") else None
        specs, adapter, base = self.check_update(begin, begin.tensors, sent, begin.base_digest)
        sources = _sources(begin, specs)
        buffers = self._engine.begin_weight_update(specs, adapter)
        checks = TensorChecks(self._engine.load_tensors)
        try:
            if not sources:
                for index, spec in enumerate(specs):
                    await self._receive_tensor(messages, index, spec, buffers[spec.name])
                    await checks.add(Complete(spec, buffers[spec.name], was_sent=True))
            elif self._engine.lend_tensors(sources):
                async for spec in self._announced(messages, specs):
                    await checks.add(Complete(spec, sources[spec.name]))
            else:
                async for spec in self._announced(messages, specs):
                    await checks.add(Complete(spec, buffers[spec.name], sources[spec.name]))
            commit = await self._next(messages, "commit")
            checked = await checks.results()
        finally:
            await checks.close()
            sources.clear()  # the traceback of an exception would keep the memory mapped
        unsound = [spec.name for spec in specs if not checked[spec.name].is_finite]
        if len(commit.checksums) != len(specs):
            raise _invalid(f"{len(commit.checksums)} checksums for {len(specs)} tensors.")
        for spec, checksum in zip(specs, commit.checksums):
            if len(checksum) != codec.CHECKSUM_BYTES:
                raise _invalid(
                    f"the checksum of {spec.name!r} has {len(checksum)} bytes, not "
                    f"{codec.CHECKSUM_BYTES}."
                )
            received = checked[spec.name].checksum
            if received is not None and not hmac.compare_digest(checksum, received):
                raise Refused(
                    grpc.StatusCode.DATA_LOSS,
                    f"tensor {spec.name!r} arrived with checksum {received.hex()[:12]}, "
                    f"not {checksum.hex()[:12]}.",
                )
        checksums = list(commit.checksums)
        if base is not None:
            specs, checksums = (*base.specs, *specs), [*base.checksums, *checksums]
        elif adapter is not None:
            count = len(self._engine.expected_tensors())
            of_base = specs[:count], checksums[:count]
            base = Base(manifest_digest(*of_base), *of_base)
        digest = manifest_digest(specs, checksums)
        if commit.digest != digest:
            raise Refused(
                grpc.StatusCode.DATA_LOSS,
                f"the manifest's digest is {digest[:12]}, not {commit.digest[:12]!r}.",
            )
        check_finite(begin.step, unsound)  # only now is it known that the client sent these values
        return WeightVersion(begin.run_id, begin.attempt_id, begin.step, digest), base

    async def _receive_tensor(
        self,
        messages: AsyncIterator[codec.WeightMessage],
        index: int,
        spec: TensorSpec,
        buffer: UInt8[np.ndarray, " bytes"],
    ) -> None:
        """Fills one staging buffer."""
        assert buffer.nbytes == spec.num_bytes
        filled = 0
        while filled < spec.num_bytes:
            chunk = await self._next(messages, "chunk", f"tensor {spec.name!r}")
            data = chunk.data
            end = filled + len(data)
            if chunk.tensor_index != index or not 0 < len(data) <= codec.CHUNK_BYTES:
                raise _invalid(
                    f"a chunk of {len(data)} bytes for tensor {chunk.tensor_index}; tensor {index} "
                    f"({spec.name!r}) is due in chunks of 1 to {codec.CHUNK_BYTES} bytes."
                )
            if end > spec.num_bytes:
                raise _invalid(f"tensor {spec.name!r} has {spec.num_bytes} bytes; {end} came.")
            buffer[filled:end] = np.frombuffer(data, np.uint8)
            filled = end

    async def _announced(
        self, messages: AsyncIterator[codec.WeightMessage], specs: Sequence[TensorSpec]
    ) -> AsyncIterator[TensorSpec]:
        """Yields every tensor, once the client says that it is in memory."""
        num_read = 0
        while num_read < len(specs):
            chunk = await self._next(messages, "chunk", f"tensor {specs[num_read].name!r}")
            if not num_read <= chunk.tensor_index < len(specs) or chunk.data:
                raise _invalid(
                    f"a chunk of {len(chunk.data)} bytes for tensor {chunk.tensor_index}; tensor "
                    f"{num_read} ({specs[num_read].name!r}) is due, in memory."
                )
            for spec in specs[num_read : chunk.tensor_index + 1]:
                yield spec
            num_read = chunk.tensor_index + 1

    async def _commit(
        self, version: WeightVersion, base: Base | None, started: float, paused: float
    ) -> None:
        result = "failed"
        try:
            await self._engine.commit_weight_update(version)
            self._version, self._base = version, base
            self._owner = version.run_id, version.attempt_id
            self.counts.weight_step = version.step
            result = "committed"
            _log.info("serves weights %s", version)
        except BaseException:
            self._engine.abort_weight_update()
            raise
        finally:
            self._end_update(result, started, paused)

    def _end_update(self, result: str, started: float, paused: float) -> None:
        """Lets calls continue. The times, in `time.monotonic()`, are the update's first and that at
        which calls began to wait."""
        counts, now = self.counts, time.monotonic()
        counts.updates[result] += 1
        if not self._gate.is_set():
            counts.pause_s += now - paused
        if result == "committed":
            counts.update_s += now - started
        self._updating = False
        self._gate.set()


def check_finite(step: int, unsound: Sequence[str]) -> None:
    """Refuses the weights of a step if tensors, named in `unsound`, have values not finite."""
    if unsound:
        more = f" and {len(unsound) - 1} more tensors" if len(unsound) > 1 else ""
        raise Refused(
            grpc.StatusCode.OUT_OF_RANGE,
            f"the weights of step {step} have values that are not finite, in tensor "
            f"{unsound[0]!r}{more}.",
        )


async def _all_set(events: Iterable[asyncio.Event]) -> None:
    for event in tuple(events):
        await event.wait()


def _is_readable(request: pb.DescribeRequest) -> bool:
    """Whether the client offers memory that this process can read."""
    if not request.HasField("memory"):
        return False
    try:
        open_memory(request.memory)
        return True
    except (OSError, ValueError):
        return False


def _sources(
    begin: pb.BeginUpdate, specs: Sequence[TensorSpec]
) -> dict[str, UInt8[np.ndarray, " _"]]:
    """The client's memory with each tensor, by name; empty if they are sent."""
    if not begin.HasField("memory"):
        return {}
    starts, num_bytes = layout(specs)
    try:
        memory = open_memory(begin.memory, num_bytes)
        return {s.name: memory[start : start + s.num_bytes] for s, start in zip(specs, starts)}
    except OSError as error:  # the client asks again before the next attempt
        raise Refused(
            grpc.StatusCode.UNAVAILABLE, f"the client's memory cannot be read: {error.strerror}."
        ) from error
    except ValueError as error:
        raise _invalid(f"begin.memory: {error}.") from error


def _stalled(what: str, timeout_s: float) -> Refused:
    return Refused(
        grpc.StatusCode.ABORTED,
        f"the client {what} for {timeout_s:g} s (rollout.stall_timeout_s of the replica).",
    )


def _invalid(message: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, message)
