"""Memory of a client that replicas on the same machine can read.

It is an anonymous file (memfd) without a size limit, which no other user can open, and which ends
with the last process that uses it. Its random name shows a replica that it has opened the file that
the client means. The file cannot shrink, so reading it cannot end the replica.

Replicas do not hash what they read there: the client writes again only when all replicas have
answered; otherwise it takes a new file (`renew`).
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import re
import secrets
import stat
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.types import TensorSpec

ALIGNMENT = 64  # bytes


class OwnMemory:
    """The client's side. Raises OSError if this system has no such files."""

    def __init__(self):
        if not hasattr(os, "memfd_create"):
            raise OSError("only Linux has anonymous files")
        self._open()

    def _open(self) -> None:
        self._name = secrets.token_hex(16)
        self._file = os.memfd_create(_title(self._name), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, 1)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._bytes = np.zeros(0, np.uint8)

    @property
    def num_bytes(self) -> int:
        return len(self._bytes)

    def message(self) -> pb.SharedMemory:
        return pb.SharedMemory(process=os.getpid(), file=self._file, name=self._name)

    def has_room(self, num_bytes: int) -> bool:
        """Whether the limits of this process (`ulimit -f`, `-v`) let `reserve` take these bytes."""
        if num_bytes <= len(self._bytes):
            return True
        try:
            os.ftruncate(self._file, num_bytes)
            mmap.mmap(self._file, num_bytes).close()
        except OSError:
            return False
        return True

    def reserve(self, num_bytes: int) -> UInt8[np.ndarray, " bytes"]:
        """The first bytes, writable; the file grows to this size and keeps it."""
        if num_bytes > len(self._bytes):
            os.ftruncate(self._file, num_bytes)
            self._bytes = np.frombuffer(mmap.mmap(self._file, num_bytes), np.uint8)
        return self._bytes[:num_bytes]

    def renew(self) -> None:
        """Takes another file; this one never changes again for replicas that still read it."""
        self.close()
        self._open()

    def close(self) -> None:
        """Replicas that have opened the file can still read it."""
        self._bytes = np.zeros(0, np.uint8)
        os.close(self._file)


def open_memory(message: pb.SharedMemory, num_bytes: int = 1) -> UInt8[np.ndarray, " bytes"]:
    """The first bytes of a client's memory, read-only; mapped until the last view of them is gone.

    Raises OSError if the client is not on this machine, is another user's, or has ended; ValueError
    if the file is not such memory, or is smaller.
    """
    if not re.fullmatch("[0-9a-f]{32}", message.name) or message.process <= 0 or message.file < 0:
        raise ValueError("the address of the memory is invalid")
    path = f"/proc/{message.process}/fd/{message.file}"
    _check_name(path, message.name)  # before it is opened: opening a device may do something
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_name(f"/proc/self/fd/{file}", message.name)
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("the memory is not a regular file")
        if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("the memory could shrink")
        if found.st_size < num_bytes:
            raise ValueError(f"the memory has {found.st_size} of {num_bytes} bytes")
        return np.frombuffer(mmap.mmap(file, num_bytes, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(file)


def layout(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """The first byte of each tensor in the memory, and the number of bytes of all."""
    sizes = [-(-spec.num_bytes // ALIGNMENT) * ALIGNMENT for spec in specs]
    *starts, end = itertools.accumulate(sizes, initial=0)
    return starts, end


def _title(name: str) -> str:
    return f"semrl-weights-{name}"


def _check_name(path: str, name: str) -> None:
    if os.readlink(path) != f"/memfd:{_title(name)} (deleted)":
        raise ValueError("the memory has another name")
