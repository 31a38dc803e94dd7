"""Sends weights to several replicas; the arrays are read and hashed only once.

A replica on this machine reads them from this process's memory. All others get them in chunks.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import queue
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import grpc
import numpy as np
from jaxtyping import UInt8

from semrl_jax.rollout.client.remote import RemoteReplica
from semrl_jax.rollout.client.replica import Replica, Waits, describe_error, fatal_error
from semrl_jax.rollout.host_memory import available_bytes
from semrl_jax.rollout.wire import bounds, codec
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.rollout.wire.shared_memory import OwnMemory, layout
from semrl_jax.support.cores import usable_cores
from semrl_jax.types import Adapter, TensorSpec, WeightVersion, manifest_digest

if TYPE_CHECKING:
    from jax import Array

    from semrl_jax.rollout.client.local import LocalReplica

_QUEUED_CHUNKS = 8  # per replica; beyond them the others wait for it, at most `Waits.sync_wait_s`
_POLL_S = 0.2
_NUM_THREADS = min(usable_cores(), 4)  # that hash
_MAX_HASHED = 4  # batches that wait, if their tensors are not kept
_BATCH_BYTES = 8 << 20  # of small tensors that one message announces, or one thread hashes


class Ended(Exception):
    """The caller's event was set."""


@dataclasses.dataclass
class Weights:
    """What replicas get, and how they know the part that does not change."""

    specs: Sequence[TensorSpec]  # of all tensors; those of an adapter are the last
    adapter: Adapter | None = None  # None: there is no base either
    num_base: int = 0  # tensors of the base of the adapter
    # Digest of the base, known once it was read; for a replica in this process a random name.
    base: str = ""
    checksums: Sequence[bytes] = ()  # of the tensors of the base

    def missing(self, replica: Replica) -> int:
        """The first tensor that a replica does not hold."""
        return self.num_base if self.base and replica.base == self.base else 0

    def note_base(self, checksums: Sequence[bytes]) -> None:
        """Keeps the checksums of the base of an adapter, if there is one, and names it by them."""
        if self.adapter is not None:
            self.checksums = checksums[: self.num_base]
            self.base = manifest_digest(self.specs[: self.num_base], self.checksums)

    def same_base(self, other: Weights) -> Weights:
        """The other weights with the base of these weights, if both have a base."""
        if None in (self.adapter, other.adapter):
            return other
        return dataclasses.replace(other, base=self.base, checksums=self.checksums)


def send_weights(
    version: WeightVersion,
    weights: Weights,
    first: int,
    arrays: Iterable[np.ndarray],
    replicas: Sequence[RemoteReplica],
    *,
    memory: OwnMemory | None,
    deadline: float,
    waits: Waits,
    ended: threading.Event | None = None,
) -> tuple[WeightVersion | None, dict[Replica, str]]:
    """Sends the arrays, in the order of their specs, to all replicas at the same time.

    A replica that holds the base of an adapter gets the adapter alone.

    A slow replica holds up the others for at most `Waits.sync_wait_s`: while they wait for the next
    bytes because it takes none, and again after the first of them has confirmed the version.

    Args:
      version: of the weights, without the digest.
      weights: `note_base` is called once the base was read.
      first: the number of the first array, 0 or `num_base`: every replica then holds the base.
      memory: for the replicas whose description says that they can read it. Renewed if one of
        them does not confirm the version, because it may then still read.
      deadline: in `time.monotonic()`.
      ended: once set, the update is cancelled, and `Ended` raised.

    Returns:
      The version that the other replicas serve, and the error of each replica that failed. None if
      all replicas failed before the last tensor was read.

    UserError or ValueError: the arrays do not fit the specs, or a replica refuses the weights
    permanently. The update is then cancelled; replicas that had committed keep it. RuntimeError: a
    replica found values that are not finite.
    """
    receivers: list[_Receiver] = []
    ended = ended or threading.Event()
    try:
        for replica in replicas:
            receivers.append(_Receiver(replica, deadline, waits, receivers, ended))
        ways = _ways(receivers, weights, memory)
        for way in ways:
            begin = pb.BeginUpdate(
                run_id=version.run_id,
                attempt_id=version.attempt_id,
                step=version.step,
                tensors=codec.encode_specs(weights.specs[way.first :]),
                base_digest=weights.base if way.first else "",
            )
            if weights.adapter is not None:
                begin.adapter.CopyFrom(pb.Adapter(**dataclasses.asdict(weights.adapter)))
            way.begin(begin)
        is_kept = any(isinstance(way, _ThroughMemory) and way.first == first for way in ways)
        specs = weights.specs[first:]
        with _Hashing(limit=0 if is_kept else _MAX_HASHED) as hashing:
            # `zip` reads the arrays first, so that `_exactly` is asked for a surplus array.
            for index, (array, spec) in enumerate(zip(_exactly(specs, arrays), specs), first):
                data = codec.as_bytes(_checked(spec, array))
                for way in ways:
                    if index >= way.first:
                        data = way.send(index - way.first, data)
                hashing.add(data)
                if all(receiver.error for receiver in receivers):
                    return None, {r.replica: r.error for r in receivers}
            checksums = [*weights.checksums[:first], *hashing.results()]
        version = dataclasses.replace(version, digest=manifest_digest(weights.specs, checksums))
        for way in ways:
            commit = pb.CommitUpdate(checksums=checksums[way.first :], digest=version.digest)
            _put_all(way.receivers, pb.UpdateWeightsRequest(commit=commit))
        weights.note_base(checksums)
        _await_replies(receivers, version, deadline, waits, ended)
    except BaseException:
        for receiver in receivers:
            receiver.cancel()
        raise
    finally:
        if any(r.reads_memory and not r.is_confirmed for r in receivers):
            memory.renew()
    return version, {r.replica: r.error for r in receivers if r.error}


def hand_over(
    version: WeightVersion,
    weights: Weights,
    first: int,
    arrays: Iterable[np.ndarray | Array],
    replica: LocalReplica,
    *,
    deadline: float,
) -> tuple[WeightVersion | None, dict[Replica, str]]:
    """Does what `send_weights` does, to a replica of this process. The version has no digest."""
    if weights.adapter is not None and not first:
        weights.base = secrets.token_hex(16)
    specs, base = weights.specs[first:], (weights.adapter, weights.base)
    # `zip` reads the arrays first, so that `_exactly` is asked for a surplus array.
    tensors = (
        (spec.name, _checked(spec, array)) for array, spec in zip(_exactly(specs, arrays), specs)
    )
    try:
        timeout_s = deadline - time.monotonic()
        return replica.take_weights(version, specs, tensors, timeout_s, *base), {}
    except grpc.RpcError as error:
        if fatal := fatal_error(replica, error):
            raise fatal from error
        return None, {replica: describe_error(error)}


class _Receiver:
    """The update stream of one replica."""

    def __init__(
        self,
        replica: RemoteReplica,
        deadline: float,
        waits: Waits,
        all_receivers: Sequence[_Receiver],
        ended: threading.Event,
    ):
        self.replica = replica
        self.error = ""  # while the update goes on, or if it went well
        self.reads_memory = False  # whether the replica was told to read this process's memory
        self.is_confirmed = False  # whether the replica serves the weights
        self._waits, self._all, self._ended = waits, all_receivers, ended
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUED_CHUNKS)
        self._holding_s = 0.0  # in which the others waited for this one
        self.call = replica.update_weights(iter(self._queue.get, None), deadline - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.is_confirmed or bool(self.error)

    def put(self, message: bytes) -> None:
        started = time.monotonic()
        while not self.error:
            if self._ended.is_set():
                raise Ended
            if self.call.done():
                self._fail("ended the update before its commit")
                return
            asked = time.monotonic()
            try:
                self._queue.put(message, timeout=_POLL_S)
                return
            except queue.Full:
                if time.monotonic() - started > self._waits.stall_timeout_s:
                    self.give_up(f"took no chunk for {self._waits.stall_timeout_s:g} s")
            finally:
                self._note_wait(time.monotonic() - asked)

    def _note_wait(self, seconds: float) -> None:
        """Counts the time in which only this replica had bytes to take."""
        others = [r for r in self._all if r is not self and not r.error]
        if others and all(receiver._queue.empty() for receiver in others):
            # A longer time is one in which this process did not run, such as after Ctrl-Z.
            self._holding_s += min(seconds, 2 * _POLL_S)
            if self._holding_s > self._waits.sync_wait_s and not self.error:
                self.give_up(f"held up the others for {self._waits.sync_wait_s:g} s")

    def check_reply(self, version: WeightVersion) -> None:
        """Reads the reply to the commit, if it is there."""
        with contextlib.suppress(queue.Full):  # the next attempt finds room, or the call ended
            self._queue.put_nowait(None)
        if not self.call.done():
            return
        try:
            reply = self.call.result()
        except (grpc.RpcError, grpc.FutureCancelledError):
            self._fail("failed without a reason")
            return
        try:
            reply = bounds.parse(pb.UpdateWeightsResponse, reply)
            committed = codec.decode_version(reply.version)
        except ValueError as error:
            self.error = f"sent an unreadable reply: {error}"
        else:
            self.is_confirmed = committed == version
            if not self.is_confirmed:
                self.error = f"committed {committed}, not {version}"
        self._end()

    def give_up(self, error: str) -> None:
        self.error = error
        self.cancel()

    def cancel(self) -> None:
        self.call.cancel()
        self._end()

    def _fail(self, reason: str) -> None:
        self._end()
        error = self.call.exception()
        if error is None:
            self.error = reason
            return
        if fatal := fatal_error(self.replica, error):
            raise fatal
        self.error = describe_error(error)

    def _end(self) -> None:
        """Ends gRPC's reading thread after the call has ended; drops the queued messages."""
        while True:
            try:
                return self._queue.put_nowait(None)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()


def _await_replies(
    receivers: Sequence[_Receiver],
    version: WeightVersion,
    deadline: float,
    waits: Waits,
    ended: threading.Event,
) -> None:
    """Waits until every replica has confirmed the version or failed."""
    any_reply = threading.Event()
    for receiver in receivers:
        receiver.call.add_done_callback(lambda _: any_reply.set())
    began = reported = asked = time.monotonic()
    waited_s = 0.0  # since the first has confirmed
    while True:
        any_reply.clear()
        for receiver in receivers:
            if not receiver.is_over:
                receiver.check_reply(version)
        if not (waiting := [receiver for receiver in receivers if not receiver.is_over]):
            return
        if ended.is_set():
            raise Ended
        now = time.monotonic()
        if any(receiver.is_confirmed for receiver in receivers):
            waited_s += min(now - asked, 2 * _POLL_S)  # longer: this process was stopped
        asked = now
        if waited_s > waits.sync_wait_s:
            for receiver in waiting:
                receiver.give_up(
                    f"had not taken the weights {waits.sync_wait_s:g} s after the first replica"
                )
            return
        if now - reported > waits.progress_every_s:
            reported = now
            names = ", ".join(receiver.replica.name for receiver in waiting)
            waits.progress(
                f"waiting for {names} to commit weights {version} ({now - began:.0f} s; deadline "
                f"in {deadline - now:.0f} s)"
            )
        any_reply.wait(_POLL_S)


def _ways(
    receivers: Sequence[_Receiver], weights: Weights, memory: OwnMemory | None
) -> list[_InChunks | _ThroughMemory]:
    """How each receiver gets what it misses."""
    ways: list[_InChunks | _ThroughMemory] = []
    for first, group in itertools.groupby(
        sorted(receivers, key=lambda receiver: weights.missing(receiver.replica)),
        lambda receiver: weights.missing(receiver.replica),
    ):
        specs = weights.specs[first:]
        ways += _ways_of(list(group), specs, first, memory)
        if any(isinstance(way, _ThroughMemory) for way in ways):
            memory = None  # it is full
    return ways


def _ways_of(
    receivers: Sequence[_Receiver],
    specs: Sequence[TensorSpec],
    first: int,
    memory: OwnMemory | None,
) -> list[_InChunks | _ThroughMemory]:
    has_room = memory is not None and memory.has_room(layout(specs)[1])
    near = [r for r in receivers if has_room and r.replica.description.reads_memory]
    num_new = layout(specs)[1] - memory.num_bytes if near else 0
    if num_new > 0 and 2 * num_new > available_bytes():
        near = []
    far = [receiver for receiver in receivers if receiver not in near]
    through_memory = [_ThroughMemory(near, first, specs, memory)] if near else []
    return through_memory + ([_InChunks(far, first)] if far else [])


class _InChunks:
    """Sends the bytes."""

    def __init__(self, receivers: Sequence[_Receiver], first: int):
        self.receivers = receivers
        self.first = first  # of all tensors, the first that it sends

    def begin(self, begin: pb.BeginUpdate) -> None:
        _put_all(self.receivers, pb.UpdateWeightsRequest(begin=begin))

    def send(self, index: int, data: UInt8[np.ndarray, " bytes"]) -> UInt8[np.ndarray, " bytes"]:
        """Sends tensor `index`, counted from `first`; returns bytes that stay during the update."""
        for start in range(0, len(data), codec.CHUNK_BYTES):
            chunk = data[start : start + codec.CHUNK_BYTES]
            # Once for all replicas.
            message = codec.encode_chunk(pb.TensorChunk(tensor_index=index), chunk)
            for receiver in self.receivers:
                receiver.put(message)
        return data


class _ThroughMemory:
    """Copies the bytes to memory that the replicas read."""

    def __init__(
        self,
        receivers: Sequence[_Receiver],
        first: int,
        specs: Sequence[TensorSpec],
        memory: OwnMemory,
    ):
        self.receivers, self.first, self._address = receivers, first, memory.message()
        self._starts, num_bytes = layout(specs)
        self._memory = memory.reserve(num_bytes)
        self._num_unsaid = 0  # bytes in memory that the replicas do not know of

    def begin(self, begin: pb.BeginUpdate) -> None:
        message = pb.UpdateWeightsRequest(begin=begin)
        message.begin.memory.CopyFrom(self._address)
        for receiver in self.receivers:
            receiver.reads_memory = True
        _put_all(self.receivers, message)

    def send(self, index: int, data: UInt8[np.ndarray, " bytes"]) -> UInt8[np.ndarray, " bytes"]:
        """See `_InChunks.send`."""
        start = self._starts[index]
        copy = self._memory[start : start + len(data)]
        copy[:] = data
        self._num_unsaid += len(data)
        if self._num_unsaid >= _BATCH_BYTES or index == len(self._starts) - 1:
            message = pb.UpdateWeightsRequest()
            message.chunk.tensor_index = index
            _put_all(self.receivers, message)
            self._num_unsaid = 0
        return copy


class _Hashing(contextlib.AbstractContextManager):
    """Computes the checksums of the tensors in threads, while the tensors are sent."""

    def __init__(self, limit: int):
        self._limit = limit  # of batches that wait; 0: none
        self._pool = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "hashing")
        self._batch: list[UInt8[np.ndarray, " bytes"]] = []
        self._num_bytes = 0  # in the batch
        self._started: list[concurrent.futures.Future[list[bytes]]] = []

    def __exit__(self, *exc_info) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, data: UInt8[np.ndarray, " bytes"]) -> None:
        self._batch.append(data)
        self._num_bytes += len(data)
        if self._num_bytes >= _BATCH_BYTES:
            self._start()
            # Waits for the batches before the last few, so that only these stay in memory.
            if self._limit and len(self._started) >= self._limit:
                self._started[-self._limit].result()

    def results(self) -> list[bytes]:
        self._start()
        return [checksum for batch in self._started for checksum in batch.result()]

    def _start(self) -> None:
        batch, self._batch, self._num_bytes = self._batch, [], 0

        def checksums() -> list[bytes]:
            return [codec.checksum(data).digest() for data in batch]

        self._started.append(self._pool.submit(checksums))


def _checked(spec: TensorSpec, array: np.ndarray | Array) -> np.ndarray | Array:
    if array.shape != spec.shape or array.dtype.name != spec.dtype:
        raise ValueError(
            f"weights: {spec.name!r} is {array.dtype.name}{list(array.shape)}; its spec says "
            f"{spec.dtype}{list(spec.shape)}."
        )
    return array


def _put_all(receivers: Sequence[_Receiver], message: pb.UpdateWeightsRequest) -> None:
    data = message.SerializeToString()  # once for all replicas
    for receiver in receivers:
        receiver.put(data)


def _exactly(
    specs: Sequence[TensorSpec], arrays: Iterable[np.ndarray | Array]
) -> Iterator[np.ndarray | Array]:
    """Yields the arrays; raises ValueError if there are more or fewer than specs."""
    count = 0
    for array in arrays:
        if count == len(specs):
            raise ValueError(f"weights: more arrays than the {len(specs)} specs.")
        count += 1
        yield array
    if count < len(specs):
        raise ValueError(f"weights: {count} arrays for {len(specs)} specs.")
