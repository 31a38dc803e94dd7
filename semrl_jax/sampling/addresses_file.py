"""The file that names the replicas of a run, which may change while it runs."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from semrl_jax.support.addresses import split_address
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import check_regular

FIELD = "rollout.addresses_file"
MAX_BYTES = 1 << 20


def check_addresses(addresses: Sequence[str], field: str = "rollout.addresses") -> None:
    """Raises UserError for a repeated address: two processes could connect to one replica."""
    twice = [address for address, n in collections.Counter(addresses).items() if n > 1]
    if twice:
        raise UserError(f"{field} names {twice[0]!r} more than once; name each replica once.")


def read_addresses(file: str) -> tuple[str, ...]:
    """The addresses in the file: one host:port a line; # starts a comment.

    Raises:
      UserError: if it cannot be read, or has no address, a wrong one, or one of them twice.
    """
    try:
        check_regular(file)
        with open(file, "rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "it is not UTF-8")
        raise UserError(
            f"{FIELD}={file} cannot be read ({reason}); name a file with one host:port a line."
        ) from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{FIELD}={file} has more than {MAX_BYTES} bytes; name a list of replicas.")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    addresses = tuple(line for line in lines if line)
    for number, line in enumerate(lines, 1):
        if line:
            split_address(line, f"{FIELD}={file}, line {number}")
    if not addresses:
        raise UserError(f"{FIELD}={file} has no address; write one host:port a line.")
    check_addresses(addresses, f"{FIELD}={file}")
    return addresses
