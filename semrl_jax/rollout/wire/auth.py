"""The token every call carries, where a connection may do without TLS, and the files of TLS."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import secrets
import ssl

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


def _is_fit_to_print(record: logging.LogRecord) -> bool:
    """Not a header: gRPC logs one that is no UTF-8, which may be a token but for one byte."""
    return not str(record.msg).startswith("Invalid encoding on")


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Ends every call without the token as UNAUTHENTICATED before its request is read."""

    def __init__(self, token: str):
        self._expected = f"Bearer {check_token(token)}".encode()
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_fit_to_print)  # once, however often
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


def check_certificates(field: str, path: str, data: bytes) -> None:
    """Raises UserError where a file, the value of `field`, holds no certificate in PEM."""
    try:
        text = data.decode("ascii", "ignore")  # comments may be in any encoding
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=text)
    except (ValueError, ssl.SSLError):
        raise UserError(
            f"{field}={path!r} must be a PEM file of certificates (BEGIN CERTIFICATE); it has none "
            "that can be read."
        ) from None


def check_key(tls_certificate: str, tls_key: str) -> None:
    """Raises UserError where a file of certificates and a file of a key do not belong together."""

    def no_password() -> str:  # rather than asking on the terminal
        return ""

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            tls_certificate, tls_key, no_password
        )
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
