"""The checks before a request over HTTP is answered: token, size, time."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Collection
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

BODY_S = 60.0  # in which a body must have come
WRONG_TOKEN = "the token is missing or wrong."


def guarded(
    app: ASGIApp,
    *,
    header: str,
    value: str,
    open_paths: Collection[str],
    refusal: dict[str, Any],
    stall_timeout_s: float,
) -> ASGIApp:
    """The application behind a header that every request needs.

    Args:
      header: its name in lower case.
      value: its value, which is secret.
      open_paths: these need no header.
      refusal: the body of the answer 401.
      stall_timeout_s: a client that reads nothing for this long loses its connection.
    """
    name, expected = header.encode(), value.encode()

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message) -> None:
            async with asyncio.timeout(stall_timeout_s):
                await send(message)

        if scope["type"] != "http":
            return
        given = [each for key, each in scope["headers"] if key == name]
        if scope["path"] not in open_paths and not (
            len(given) == 1 and hmac.compare_digest(given[0], expected)
        ):
            headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
            return await JSONResponse(refusal, 401, headers)(scope, receive, sent)
        try:
            await app(scope, receive, sent)
        except (TimeoutError, ClientDisconnect):  # nobody reads
            return

    return checked


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request; raises HTTPException if it is too long or slow."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                data += part
                if len(data) > max_bytes:
                    raise HTTPException(413, f"the body has more than {max_bytes} bytes.")
    except TimeoutError:
        raise HTTPException(408, f"the body took more than {BODY_S:g} s.") from None
    return bytes(data)
