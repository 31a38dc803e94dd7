"""The token that every call carries, and the checks of TLS files."""

from __future__ import annotations

import hmac
import logging
import pathlib
import secrets
import ssl

import grpc

from semrl_jax.support.errors import UserError

TOKEN_VARIABLE = "SEMRL_ROLLOUT_TOKEN"  # environment variable
_HEADER = "authorization"


def new_token() -> str:
    """A random token of 256 bits."""
    return secrets.token_urlsafe(32)


def check_token(token: str) -> str:
    """Returns the token; raises UserError if it is empty or cannot be sent in a header."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"the rollout token has {len(token)} characters; it must be one printable ASCII word. "
            "Take one from `python -c 'import secrets; print(secrets.token_urlsafe(32))'`."
        )
    return token


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call that carries the token."""
    return ((_HEADER, f"Bearer {token}"),)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Ends every call without the token as UNAUTHENTICATED, before its request is read."""

    def __init__(self, token: str):
        self._expected = f"Bearer {check_token(token)}".encode()
        # Drops gRPC's message about a header that is not UTF-8: it quotes what may be a token.
        logging.getLogger("grpc._cython.cygrpc").addFilter(
            lambda record: not str(record.msg).startswith("Invalid encoding on")
        )
        # One handler for unary and streaming methods: they are the same on the wire.
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


def read_file(field: str, path: str) -> bytes:
    """Raises UserError if the file cannot be read; gRPC's own errors do not name it."""
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{field}={path!r} cannot be read: {error.strerror}.") from error


def read_certificates(field: str, path: str) -> bytes:
    """Reads a file as `read_file`; also raises UserError if it has no PEM certificate."""
    data = read_file(field, path)
    try:
        text = data.decode("ascii", "ignore")  # comments may have any encoding
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=text)
    except (ValueError, ssl.SSLError):
        raise UserError(
            f"{field}={path!r} must be a PEM file of certificates (BEGIN CERTIFICATE); it has none "
            "that can be read."
        ) from None
    return data


def check_key(tls_certificate: str, tls_key: str) -> None:
    """Raises UserError if the private key cannot be read or does not fit the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password, Python would ask for it on the terminal.
        context.load_cert_chain(tls_certificate, tls_key, lambda: "")
    except (ValueError, ssl.SSLError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise UserError(
                f"tls_key={tls_key!r} is not the key of tls_certificate={tls_certificate!r}; give "
                "the key that the certificate was made with."
            ) from None
        raise UserError(
            f"tls_key={tls_key!r} must be a PEM file of a private key (BEGIN PRIVATE KEY) without "
            "a password; it has none that can be read."
        ) from None
