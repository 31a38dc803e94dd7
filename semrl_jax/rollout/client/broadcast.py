"""Streams the weights to several replicas; they are read and hashed once for all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import queue
import time
from collections.abc import Callable, Iterable, Sequence

import grpc
import numpy as np

from semrl_jax.rollout.client.replica import Replica, describe_error, fatal_error
from semrl_jax.rollout.wire import bounds, codec
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.types import TensorSpec, WeightVersion, manifest_digest

_QUEUED_CHUNKS = 8  # per replica; beyond them the fastest replica waits for the slowest
_POLL_S = 0.2


@dataclasses.dataclass(frozen=True)
class Broadcast:
    """What to send, without the digest of the weights, and how long to wait."""

    run_id: str
    attempt_id: str
    step: int
    specs: Sequence[TensorSpec]
    timeout_s: float
    stall_timeout_s: float
    progress_every_s: float
    progress: Callable[[str], None]


def send_weights(
    job: Broadcast, arrays: Iterable[np.ndarray], replicas: Sequence[Replica]
) -> tuple[WeightVersion | None, dict[Replica, str]]:
    """Sends the arrays, in the order of `job.specs`, to all replicas at the same time.

    Returns:
      The version, and the reason of the failure for each replica that failed. The other replicas
      serve the version. The version is None if all replicas failed before the last tensor was read.

    Raises:
      ValueError: the arrays do not fit the specs.
      UserError, ValueError: a replica refuses the weights permanently. The update is then cancelled
        on all replicas; only a replica that had already committed serves the version.
      RuntimeError: a replica found values that are not finite.
    """
    deadline = time.monotonic() + job.timeout_s
    receivers: list[_Receiver] = []
    try:
        for replica in replicas:
            receivers.append(_Receiver(replica, job))
        begin = pb.BeginUpdate(
            run_id=job.run_id,
            attempt_id=job.attempt_id,
            step=job.step,
            tensors=codec.encode_specs(job.specs),
        )
        _put_all(receivers, pb.UpdateWeightsRequest(begin=begin))
        checksums = []
        # The arrays come first in the zip, so that it asks for one more array than there are specs
        # and `_exactly` can find a surplus.
        for index, (array, spec) in enumerate(zip(_exactly(job.specs, arrays), job.specs)):
            checksums.append(_send_tensor(receivers, index, spec, array))
            if all(receiver.error for receiver in receivers):
                return None, {r.replica: r.error for r in receivers}
        digest = manifest_digest(job.specs, checksums)
        version = WeightVersion(job.run_id, job.attempt_id, job.step, digest)
        commit = pb.CommitUpdate(checksums=checksums, digest=digest)
        _put_all(receivers, pb.UpdateWeightsRequest(commit=commit))
        for receiver in receivers:
            receiver.finish(version, deadline)
    except BaseException:
        for receiver in receivers:
            receiver.cancel()
        raise
    return version, {r.replica: r.error for r in receivers if r.error}


class _Receiver:
    """The update stream of one replica."""

    def __init__(self, replica: Replica, job: Broadcast):
        self.replica = replica
        self.error = ""
        self._job = job
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUED_CHUNKS)
        # gRPC reads the queue in a thread, until it finds None.
        self._call = replica.update_weights(iter(self._queue.get, None), job.timeout_s)

    def put(self, message: bytes) -> None:
        started = time.monotonic()
        while not self.error:
            if self._call.done():
                self._fail("ended the update before its commit")
                return
            try:
                return self._queue.put(message, timeout=_POLL_S)
            except queue.Full:
                if time.monotonic() - started > self._job.stall_timeout_s:
                    self.error = f"took no chunk for {self._job.stall_timeout_s:g} s"
                    self.cancel()

    def finish(self, version: WeightVersion, deadline: float) -> None:
        """Waits for the reply to the commit."""
        started = now = time.monotonic()
        while not self.error:
            self._put_end()
            try:
                reply = self._call.result(timeout=_POLL_S)
            except grpc.FutureTimeoutError:
                if time.monotonic() - now > self._job.progress_every_s:
                    now = time.monotonic()
                    self._job.progress(
                        f"waiting for {self.replica.name} to commit weights {version} "
                        f"({now - started:.0f} s; deadline in {deadline - now:.0f} s)"
                    )
            except grpc.RpcError:
                self._fail("failed without a reason")
            else:
                try:
                    reply = bounds.parse_reply(pb.UpdateWeightsResponse, reply)
                    committed = codec.decode_version(reply.version)
                except ValueError as error:
                    self.error = f"sent an unreadable reply: {error}"
                else:
                    if committed != version:
                        self.error = f"committed {committed}, not {version}"
                self._end()
                return

    def cancel(self) -> None:
        self._call.cancel()
        self._end()

    def _fail(self, reason: str) -> None:
        self._end()
        error = self._call.exception()
        if error is None:
            self.error = reason
            return
        if fatal := fatal_error(self.replica, error):
            raise fatal
        self.error = describe_error(error)

    def _put_end(self) -> None:
        with contextlib.suppress(queue.Full):  # the next attempt finds room, or the call has ended
            self._queue.put_nowait(None)

    def _end(self) -> None:
        """Ends gRPC's reading thread after the call has ended; drops what is still queued."""
        while True:
            try:
                return self._queue.put_nowait(None)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()


def _send_tensor(
    receivers: Sequence[_Receiver], index: int, spec: TensorSpec, array: np.ndarray
) -> bytes:
    if array.shape != spec.shape or array.dtype.name != spec.dtype:
        raise ValueError(
            f"weights: {spec.name!r} is {array.dtype.name}{list(array.shape)}; its spec says "
            f"{spec.dtype}{list(spec.shape)}."
        )
    data = codec.as_bytes(array)
    checksum = hashlib.sha256()
    for start in range(0, len(data), codec.CHUNK_BYTES):
        chunk = data[start : start + codec.CHUNK_BYTES]
        message = pb.UpdateWeightsRequest()
        message.chunk.tensor_index = index
        message.chunk.data = chunk.tobytes()
        _put_all(receivers, message)
        checksum.update(chunk)
    return checksum.digest()


def _put_all(receivers: Sequence[_Receiver], message: pb.UpdateWeightsRequest) -> None:
    data = message.SerializeToString()  # once for all replicas
    for receiver in receivers:
        receiver.put(data)


def _exactly(specs: Sequence[TensorSpec], arrays: Iterable[np.ndarray]):
    """Yields the arrays; raises ValueError if there are more or fewer than specs."""
    count = 0
    for array in arrays:
        if count == len(specs):
            raise ValueError(f"weights: more arrays than the {len(specs)} specs.")
        count += 1
        yield array
    if count < len(specs):
        raise ValueError(f"weights: {count} arrays for {len(specs)} specs.")
