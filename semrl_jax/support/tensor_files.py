"""Writes safetensors files that are equal to the byte for equal content."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping

import numpy as np

DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def write_tensors(
    out: io.BufferedIOBase, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes tensors in little-endian order; wide dtypes come first, then names decide.

    The safetensors package creates files that only their owner can read, and writes metadata in
    random order. With one entry of metadata and one dtype, the bytes are the same.
    """
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        dtype = DTYPES[tensor.dtype.name]
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    out.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        out.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8))
