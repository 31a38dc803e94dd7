"""Hidden states of running requests in memory that two processes share.

A pool has slots of rows. The process that asks gives each request a slot and a tag of its own; the
vLLM worker writes row t, beside the tag, once the state that gives output token t is computed, and
where they are asked for the states at the prompt's tokens into rows behind those; when the request
has ended the asking process reads its rows and checks every tag. So a row that is missing, late or
another request's is an error and never a wrong number.

The memory is an anonymous file (memfd): it has no name under /dev/shm, whose size limits (64 MB in
Docker) do not apply, and it is gone with the processes, however they end. Pages take memory when
they are first written. NumPy alone: the two ends read and write bytes.
"""

from __future__ import annotations

import dataclasses
import mmap
import os

import numpy as np

TAG_BYTES = 8
MADV_REMOVE = 9  # of Linux; Python's mmap names it from 3.13 on, where the C library does


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """What both ends must know; plain numbers, so that it travels in a call.

    Attributes:
      num_slots: requests at once.
      num_rows: output tokens a request at most.
      num_prompt_rows: prompt tokens a request at most; their rows follow.
      width: entries of a row.
      item_bytes: of an entry.
    """

    num_slots: int
    num_rows: int
    num_prompt_rows: int
    width: int
    item_bytes: int

    @property
    def rows_a_slot(self) -> int:
        return self.num_rows + self.num_prompt_rows

    @property
    def row_bytes(self) -> int:
        return self.width * self.item_bytes

    @property
    def tag_bytes(self) -> int:
        """Bytes of all tags, in front of the rows; whole pages."""
        return -(-self.num_slots * self.rows_a_slot * TAG_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def num_bytes(self) -> int:
        return self.tag_bytes + self.num_slots * self.rows_a_slot * self.row_bytes


class RowPool:
    """One end of a pool.

    Args:
      shape: of the pool.
      path: of the other end's file; "" makes one.

    Attributes:
      path: under which another process of the same user finds this end's file.
      tags: int64 [slots, rows]; 0 where nothing was written.
      rows: uint8 [slots, rows, width * item_bytes].
    """

    def __init__(self, shape: PoolShape, path: str = ""):
        self.shape = shape
        if path:
            self._file = os.open(path, os.O_RDWR)
        else:
            self._file = os.memfd_create("semrl-states", os.MFD_CLOEXEC)
            os.ftruncate(self._file, shape.num_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._memory = mmap.mmap(self._file, shape.num_bytes)
        counts = shape.num_slots, shape.rows_a_slot
        self.tags = np.frombuffer(self._memory, np.int64, counts[0] * counts[1]).reshape(counts)
        self.rows = np.frombuffer(self._memory, np.uint8, offset=shape.tag_bytes).reshape(
            *counts, shape.row_bytes
        )

    def read(self, slot: int, tag: int, count: int) -> np.ndarray:
        """A copy of the rows of the first `count` output tokens, uint8 [count, row_bytes].

        Raises:
          RuntimeError: if one of them is not of the request with this tag.
        """
        return self._read(slot, tag, slice(count))

    def take_prompt(self, slot: int, tag: int, count: int) -> np.ndarray:
        """As `read`, of the first `count` prompt tokens; gives their memory back, as few ask."""
        first = self.shape.num_rows
        found = self._read(slot, tag, slice(first, first + count))
        start = self.shape.tag_bytes + self.shape.row_bytes * (
            slot * self.shape.rows_a_slot + first
        )
        stop = start + self.shape.row_bytes * self.shape.num_prompt_rows
        pages = -(-start // mmap.PAGESIZE), stop // mmap.PAGESIZE
        if (
            pages[0] < pages[1]
        ):  # whole ones; all of the slot's: an aborted prompt has more than read
            begin, end = (page * mmap.PAGESIZE for page in pages)
            self._memory.madvise(MADV_REMOVE, begin, end - begin)
        return found

    def _read(self, slot: int, tag: int, rows: slice) -> np.ndarray:
        tags = self.tags[slot, rows]
        wrong = np.flatnonzero(tags != tag)
        if len(wrong):
            raise RuntimeError(
                f"hidden state {wrong[0]} was not written ({len(wrong)} of {len(tags)} in all): "
                "the tap on the worker does not fit this version of vLLM."
            )
        return self.rows[slot, rows].copy()

    def close(self) -> None:
        """Lets go of the memory; the arrays must not be used any more."""
        del self.tags, self.rows
        self._memory.close()
        os.close(self._file)
