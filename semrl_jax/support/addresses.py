"""Addresses of replicas and of process 0, as host:port."""

from __future__ import annotations

import ipaddress
import re

from semrl_jax.support.errors import UserError


def split_address(address: str, field: str) -> tuple[str, int]:
    """Splits host:port, with brackets around IPv6; UserError, naming `field`, if it is wrong."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^:\s\[\]/]+):(\d{1,5})", address, re.ASCII)
    if match is None or not 0 < int(match[2]) < 2**16:
        raise UserError(
            f"{field}={address!r:.200} must be host:port, such as 10.0.0.1:8482 or [fd00::1]:8482."
        )
    host = match[1].strip("[]")
    try:
        host.encode("idna")  # every name look-up does the same
    except UnicodeError:
        raise UserError(
            f"{field}={address!r:.200}: each part of a host name must have 1 to 63 letters."
        ) from None
    return host, int(match[2])


def is_loopback(host: str) -> bool:
    """Whether traffic to this host, with or without brackets, stays on this machine."""
    host = host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(host: str, port: int, has_tls: bool) -> str:
    """The address as clients write it, with brackets around IPv6."""
    host = host.strip("[]")
    return f"http{'s' * has_tls}://{f'[{host}]' if ':' in host else host}:{port}"
