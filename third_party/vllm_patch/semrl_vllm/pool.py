"""Hidden states of running requests in memory that two processes share.

A pool has slots, and a slot has rows. The engine gives each request a slot and a unique tag. The
vLLM worker writes the state that gives output token t into row t of the slot, and marks the row
with the tag. States at the prompt's tokens, if they are asked for, follow in further rows. When the
request has ended, the engine reads its rows and checks every tag. A row that is missing, late or of
another request is therefore an error and never a wrong number.

The memory is an anonymous file (memfd). It is not in /dev/shm, so the size limit there (64 MB in
Docker) does not apply, and the kernel frees it when the processes have ended. Pages take memory
when they are first written. Uses NumPy only; the rows are bytes.
"""

from __future__ import annotations

import dataclasses
import mmap
import os

import numpy as np

TAG_BYTES = 8
MADV_REMOVE = 9  # of Linux; Python's mmap has this name only from 3.13 on


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """The layout of a pool, as plain numbers that can be sent to the worker.

    Attributes:
      num_slots: number of concurrent requests.
      num_rows: limit on the output tokens per request.
      num_prompt_rows: limit on the prompt tokens per request; their rows follow.
      width: entries per row.
      item_bytes: bytes per entry.
    """

    num_slots: int
    num_rows: int
    num_prompt_rows: int
    width: int
    item_bytes: int

    @property
    def rows_per_slot(self) -> int:
        return self.num_rows + self.num_prompt_rows

    @property
    def row_bytes(self) -> int:
        return self.width * self.item_bytes

    @property
    def tag_bytes(self) -> int:
        """Bytes of all tags, in front of the rows; whole pages."""
        return -(-self.num_slots * self.rows_per_slot * TAG_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def num_bytes(self) -> int:
        return self.tag_bytes + self.num_slots * self.rows_per_slot * self.row_bytes


class RowPool:
    """A pool, mapped into this process.

    Args:
      shape: the layout of the pool.
      path: the file of the process that made the pool; "" makes a pool.

    Attributes:
      path: opens the file in other processes of the same user.
      tags: int64 [slots, rows]; 0 in rows that were never written.
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
        counts = shape.num_slots, shape.rows_per_slot
        self.tags = np.frombuffer(self._memory, np.int64, counts[0] * counts[1]).reshape(counts)
        self.rows = np.frombuffer(self._memory, np.uint8, offset=shape.tag_bytes).reshape(
            *counts, shape.row_bytes
        )

    def read(self, slot: int, tag: int, count: int) -> np.ndarray:
        """A copy of the rows of the first `count` output tokens, uint8 [count, row_bytes].

        Raises:
          RuntimeError: if a row was not written by the request with this tag.
        """
        return self._read(slot, tag, slice(count))

    def take_prompt(self, slot: int, tag: int, count: int) -> np.ndarray:
        """Reads the first `count` prompt tokens, then frees the memory of all prompt rows.

        Few calls ask for prompt states, so the memory is not kept for the next request.
        """
        first = self.shape.num_rows
        found = self._read(slot, tag, slice(first, first + count))
        start = self.shape.tag_bytes + self.shape.row_bytes * (
            slot * self.shape.rows_per_slot + first
        )
        stop = start + self.shape.row_bytes * self.shape.num_prompt_rows
        pages = -(-start // mmap.PAGESIZE), stop // mmap.PAGESIZE
        # Whole pages only. All rows of the slot, because an aborted prompt wrote more than is read.
        if pages[0] < pages[1]:
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
        """Unmaps the memory; the arrays must not be used afterwards."""
        del self.tags, self.rows
        self._memory.close()
        os.close(self._file)
