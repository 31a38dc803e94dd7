"""The token every call carries, and where a connection may do without TLS."""

from __future__ import annotations

import hmac
import ipaddress
import secrets

import grpc

from semrl_jax.errors import UserError

TOKEN_VARIABLE = "SEMRL_ROLLOUT_TOKEN"  # of the environment
_HEADER = "authorization"


def new_token() -> str:
    """A random token of 256 bits."""
    return secrets.token_urlsafe(32)


def check_token(token: str) -> str:
    """Returns the token; raises UserError where it is empty or does not fit into a header."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"the rollout token has {len(token)} characters; it must be one printable ASCII word. "
            "Take one from `python -c 'import secrets; print(secrets.token_urlsafe(32))'`."
        )
    return token


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call that is allowed in."""
    return ((_HEADER, f"Bearer {token}"),)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Ends every call without the token as UNAUTHENTICATED before its request is read."""

    def __init__(self, token: str):
        self._expected = f"Bearer {check_token(token)}".encode()
        # One handler for all kinds of method: on the wire they are the same stream.
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(self, continuation, handler_call_details):
        given = [
            value if isinstance(value, bytes) else value.encode()
            for key, value in handler_call_details.invocation_metadata or ()
            if key == _HEADER
        ]
        if len(given) == 1 and hmac.compare_digest(given[0], self._expected):
            return await continuation(handler_call_details)
        return self._refusal


async def _refuse(request_iterator, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong.")


def is_loopback(host: str) -> bool:
    """Whether traffic to this host stays on the machine."""
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
