"""Streams weights to several replicas; the arrays are read and hashed only once."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import queue
import time
from collections.abc import Iterable, Sequence

import grpc
import numpy as np

from semrl_jax.rollout.client.replica import Replica, Waits, describe_error, fatal_error
from semrl_jax.rollout.wire import bounds, codec
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.types import TensorSpec, WeightVersion, manifest_digest

_QUEUED_CHUNKS = 8  # per replica; beyond them the fastest replica waits for the slowest
_POLL_S = 0.2


def send_weights(
    version: WeightVersion,
    specs: Sequence[TensorSpec],
    arrays: Iterable[np.ndarray],
    replicas: Sequence[Replica],
    *,
    deadline: float,
    waits: Waits,
) -> tuple[WeightVersion | None, dict[Replica, str]]:
    """Sends the arrays, in the order of `specs`, to all replicas at the same time.

    Args:
      version: of the weights, without the digest.
      deadline: in `time.monotonic()`.

    Returns:
      The version, and the error of each replica that failed. The other replicas serve the version.
      It is None if all replicas failed before the last tensor was read.

    Raises:
      UserError, ValueError: the arrays do not fit the specs, or a replica refuses the weights
        permanently. The update is then cancelled; replicas that had committed keep it.
      RuntimeError: a replica found values that are not finite.
    """
    receivers: list[_Receiver] = []
    try:
        for replica in replicas:
            receivers.append(_Receiver(replica, deadline, waits))
        begin = pb.BeginUpdate(
            run_id=version.run_id,
            attempt_id=version.attempt_id,
            step=version.step,
            tensors=codec.encode_specs(specs),
        )
        _put_all(receivers, pb.UpdateWeightsRequest(begin=begin))
        checksums = []
        # `zip` reads the arrays first, so that `_exactly` is asked for a surplus array.
        for index, (array, spec) in enumerate(zip(_exactly(specs, arrays), specs)):
            checksums.append(_send_tensor(receivers, index, spec, array))
            if all(receiver.error for receiver in receivers):
                return None, {r.replica: r.error for r in receivers}
        version = dataclasses.replace(version, digest=manifest_digest(specs, checksums))
        commit = pb.CommitUpdate(checksums=checksums, digest=version.digest)
        _put_all(receivers, pb.UpdateWeightsRequest(commit=commit))
        for receiver in receivers:
            receiver.finish(version)
    except BaseException:
        for receiver in receivers:
            receiver.cancel()
        raise
    return version, {r.replica: r.error for r in receivers if r.error}


class _Receiver:
    """The update stream of one replica."""

    def __init__(self, replica: Replica, deadline: float, waits: Waits):
        self.replica = replica
        self.error = ""
        self._deadline, self._waits = deadline, waits
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUED_CHUNKS)
        # gRPC reads the queue in a thread, until it finds None.
        self._call = replica.update_weights(
            iter(self._queue.get, None), deadline - time.monotonic()
        )

    def put(self, message: bytes) -> None:
        started = time.monotonic()
        while not self.error:
            if self._call.done():
                self._fail("ended the update before its commit")
                return
            try:
                return self._queue.put(message, timeout=_POLL_S)
            except queue.Full:
                if time.monotonic() - started > self._waits.stall_timeout_s:
                    self.error = f"took no chunk for {self._waits.stall_timeout_s:g} s"
                    self.cancel()

    def finish(self, version: WeightVersion) -> None:
        """Waits for the reply to the commit."""
        started = now = time.monotonic()
        while not self.error:
            with contextlib.suppress(queue.Full):  # the next attempt finds room, or the call ended
                self._queue.put_nowait(None)
            try:
                reply = self._call.result(timeout=_POLL_S)
            except grpc.FutureTimeoutError:
                if time.monotonic() - now > self._waits.progress_every_s:
                    now = time.monotonic()
                    self._waits.progress(
                        f"waiting for {self.replica.name} to commit weights {version} "
                        f"({now - started:.0f} s; deadline in {self._deadline - now:.0f} s)"
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

    def _end(self) -> None:
        """Ends gRPC's reading thread after the call has ended; drops the queued messages."""
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
