"""Bytes that all processes gather over the mesh."""

import contextlib
import types

import numpy as np
import pytest
from jax.experimental import multihost_utils

from semrl_jax.cluster import connecting


@pytest.mark.parametrize("lengths", [(700, 0, 3, 0), (0, 0, 0, 0), (5, 256, 257, 1)])
def test_a_collective_is_limited_though_one_process_has_all_the_data(monkeypatch, lengths):
    """A batch of long responses has gigabytes, and every device has what is gathered at once."""
    monkeypatch.setattr(connecting, "MIN_GATHERED_BYTES", 16)
    monkeypatch.setattr(connecting, "MAX_GATHERED_BYTES", 1024)
    data = [bytes(range(1, 251)) * 3 for _ in lengths]
    data = [each[:length] for each, length in zip(data, lengths)]
    others, sizes = [list(each) for each in data], []

    def process_allgather(padded):
        sizes.append(len(lengths) * padded.nbytes)
        rows = np.zeros((len(lengths), len(padded)), np.uint8)
        for row, other in zip(rows, others):
            part, other[:] = other[: len(padded)], other[len(padded) :]
            row[: len(part)] = part
        np.testing.assert_array_equal(rows[0], padded)
        return rows

    monkeypatch.setattr(multihost_utils, "process_allgather", process_allgather)
    peers = types.SimpleNamespace(
        count=len(lengths),
        gather=lambda phase, value: list(lengths),
        phase=lambda phase: contextlib.nullcontext(),
    )
    assert connecting.gather_bytes(peers, "exchange", data[0]) == data
    assert all(size <= 1024 for size in sizes)
