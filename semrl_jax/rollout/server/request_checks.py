"""Checks every request before its method runs, and ends failed calls with a one-line status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import grpc
from google.protobuf.message import Message

from semrl_jax.rollout.engines.base import EngineDeadError
from semrl_jax.rollout.wire import bounds, codec
from semrl_jax.rollout.wire.codec import LimitExceeded, NotOffered

_log = logging.getLogger(__name__)

MAX_STATUS_BYTES = 1500  # the escaped status must fit into a header of 8 KiB, or gRPC drops it
_ABORT_S = 1.0  # longest wait for a client to read its status
_CODES = {
    LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotOffered: grpc.StatusCode.UNIMPLEMENTED,
}


class Refused(Exception):
    """Ends a call with a status; the server continues to serve."""

    def __init__(self, code: grpc.StatusCode, message: str):
        super().__init__(message)
        self.code = code


class Guard(grpc.aio.ServerInterceptor):
    """Passes on requests that are within bounds, and turns exceptions of methods into a status.

    Args:
      readers: parse the requests, by the method's path. Calls of these methods need a deadline; all
        other methods take small messages only.
      on_dead: called when a method reports that the engine has died.
    """

    def __init__(self, readers: Mapping[str, bounds.Reader], on_dead: Callable[[], None]):
        self._readers = readers
        self._on_dead = on_dead
        self._long_reads = asyncio.Lock()  # one at a time, because each may need much memory

    async def intercept_service(self, continuation, handler_call_details):
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method
            return None
        method = handler_call_details.method
        is_ours = method in self._readers
        reader = self._readers.get(method) or bounds.Reader(handler.request_deserializer)

        async def requests(messages: AsyncIterator[bytes]):
            async for data in messages:
                yield await self._read(reader, data)

        async def with_request(data: bytes, context: grpc.aio.ServicerContext):
            async with self._failures_as_status(method, is_ours, context):
                inner = handler.unary_stream or handler.unary_unary
                return await inner(await self._read(reader, data), context)

        async def with_requests(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext):
            async with self._failures_as_status(method, is_ours, context):
                return await handler.stream_unary(requests(messages), context)

        async def with_both(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext):
            async with self._failures_as_status(method, is_ours, context):
                async for reply in handler.stream_stream(requests(messages), context):
                    yield reply

        return handler._replace(
            request_deserializer=None,
            response_serializer=_serialize,
            unary_unary=handler.unary_unary and with_request,
            unary_stream=handler.unary_stream and with_request,
            stream_unary=handler.stream_unary and with_requests,
            stream_stream=handler.stream_stream and with_both,
        )

    async def _read(self, reader: bounds.Reader, data: bytes):
        with refused_if_invalid():
            if not reader.is_long:
                return reader.read(data)
            async with self._long_reads:
                reading = asyncio.create_task(asyncio.to_thread(reader.read, data))
                try:
                    return await asyncio.shield(reading)
                except asyncio.CancelledError:  # the thread cannot be stopped: wait for its end
                    await asyncio.wait([reading])
                    raise

    @contextlib.asynccontextmanager
    async def _failures_as_status(
        self, method: str, needs_deadline: bool, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[None]:
        try:
            if needs_deadline:
                _check_deadline(context.time_remaining())
            yield
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            if isinstance(error, EngineDeadError):
                self._on_dead()
            await _abort(context, *status_of(error, method))


@contextlib.contextmanager
def refused_if_invalid() -> Iterator[None]:
    """Raises Refused for the ValueError of a check."""
    try:
        yield
    except ValueError as error:
        code = _CODES.get(type(error), grpc.StatusCode.INVALID_ARGUMENT)
        raise Refused(code, str(error)) from None


def status_of(error: Exception, method: str) -> tuple[grpc.StatusCode, str]:
    """The status with which an exception ends a call; logs those that no client caused."""
    if isinstance(error, Refused):
        return error.code, str(error)
    if isinstance(error, LimitExceeded):
        return grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
    if isinstance(error, EngineDeadError):
        _log.error("the engine is dead: %s", error)
        return grpc.StatusCode.UNAVAILABLE, f"the engine is dead: {error}"
    _log.error("%s failed", method, exc_info=error)
    return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"


def _serialize(reply: Message | bytes) -> bytes:
    return reply if isinstance(reply, bytes) else reply.SerializeToString()


def _check_deadline(remaining_s: float | None) -> None:
    """Refuses a call without a deadline or with a late one, until which gRPC would keep it."""
    if remaining_s is None:
        reason = "the call has no deadline; every call needs one"
    elif remaining_s > codec.MAX_CALL_S:
        reason = f"the call's deadline is {remaining_s:.0f} s away"
    else:
        return
    raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"{reason}, of at most {codec.MAX_CALL_S:g} s.")


async def _abort(context: grpc.aio.ServicerContext, code: grpc.StatusCode, message: str) -> None:
    """Ends the call with a status; always raises."""
    data = " ".join(message.split()).encode(errors="replace")
    if len(data) > MAX_STATUS_BYTES:
        data = data[:MAX_STATUS_BYTES] + b" ..."
    try:
        await asyncio.wait_for(context.abort(code, data.decode(errors="ignore")), _ABORT_S)
    except TimeoutError:
        # The client may still read the status later. gRPC would log any other exception.
        raise asyncio.CancelledError from None
