"""Safetensors files: equal bytes for equal content, readable as the umask allows."""

import io

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save

from semrl_jax.support.tensor_files import write_tensors


def written(tensors, metadata):
    out = io.BytesIO()
    write_tensors(out, tensors, metadata)
    return out.getvalue()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_bytes_are_those_of_the_safetensors_package(dtype):
    values = np.arange(24, dtype=np.float32).astype(dtype)
    tensors = {
        "z": values.reshape(2, 3, 4),
        "a.é": values[:5],
        "scalar": np.asarray(values[3]),
        "empty": values[:0].reshape(0, 7),
    }
    assert written(tensors, {"format": "pt"}) == save(tensors, {"format": "pt"})
    strided = {"a": values.reshape(4, 6).T[::2]}
    copied = {"a": np.ascontiguousarray(strided["a"])}
    assert written(strided, {"format": "pt"}) == save(copied, {"format": "pt"})


def test_the_order_of_entries_does_not_matter():
    tensors = {name: np.full(3, i, np.float32) for i, name in enumerate("abcdef")}
    metadata = {name: name for name in ("format", "base", "layers", "more")}
    backwards = (dict(reversed(entries.items())) for entries in (tensors, metadata))
    assert written(tensors, metadata) == written(*backwards)
