"""Saved hidden states: an .npz or .safetensors file with one batch of responses."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float
from safetensors import safe_open

from semrl_jax.support.errors import UserError

STATES, MASK = "hidden_states", "response_mask"
# What a file may say about the responses, for a study: leading axes, kinds of its dtype.
OPTIONAL = {
    "group_id": (1, "iu"),
    "response_ids": (2, "iu"),
    "logprobs": (2, "f"),
    "score": (1, "f"),
    "correct": (1, "b"),
}
KINDS = {"i": "integer", "u": "unsigned", "f": "floating", "b": "bool"}
DTYPES = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))


def read_states(
    path: str | os.PathLike[str],
) -> tuple[Float[np.ndarray, "B T D"], Bool[np.ndarray, "B T"]]:
    """Reads `hidden_states` and `response_mask` of an .npz or .safetensors file.

    `hidden_states` is [B, T, D], or [T, D] for one response, in float16, float32, float64 or, in
    safetensors, bfloat16; rows outside the mask may hold anything. `response_mask` is bool with its
    leading axes; without it every row counts. UserError names the file and what is wrong.
    """
    arrays = read_arrays(path)
    return arrays[STATES], arrays[MASK]


def read_arrays(
    path: str | os.PathLike[str], optional: Mapping[str, tuple[int, str]] = MappingProxyType({})
) -> dict[str, np.ndarray]:
    """Reads what `read_states` reads, by name, and further arrays of the file.

    `optional` has for each of these how many of the axes [B, T] it has, and the kinds of its dtype
    as in NumPy.
    """
    file = pathlib.Path(path)
    if file.suffix not in (".npz", ".safetensors"):
        raise UserError(f"{file} must end in .npz or .safetensors.")
    if not file.is_file():
        raise UserError(f"{file} is no file.")
    try:
        read = _read_npz if file.suffix == ".npz" else _read_safetensors
        arrays = read(file, (STATES, MASK, *optional))
    except Exception as error:  # a damaged file breaks the readers in any way
        raise UserError(f"{file} cannot be read: {type(error).__name__}: {error}.") from None
    if STATES not in arrays:
        raise UserError(f"{file} has no array {STATES!r}; save the states under that name.")
    states = arrays[STATES]
    if states.ndim not in (2, 3) or 0 in states.shape:
        raise UserError(
            f"{file}: {STATES} has shape {states.shape}; it must be [B, T, D], or [T, D] for one "
            "response, and not empty: choose one layer."
        )
    if states.dtype not in DTYPES:
        raise UserError(
            f"{file}: {STATES} has dtype {states.dtype}; it must be one of "
            f"{', '.join(map(str, DTYPES))}, and bfloat16 needs a .safetensors file."
        )
    mask = arrays.get(MASK)
    if mask is None:
        mask = np.ones(states.shape[:-1], bool)
    if mask.shape != states.shape[:-1]:
        raise UserError(
            f"{file}: {MASK} has shape {mask.shape}; {STATES} need {states.shape[:-1]}."
        )
    if mask.dtype != bool:
        raise UserError(
            f"{file}: {MASK} has dtype {mask.dtype}; it must be bool, True on tokens that count."
        )
    arrays[MASK] = mask
    for name in optional.keys() & arrays.keys():
        num_axes, kinds = optional[name]
        expected = states.shape[states.ndim - 3 : states.ndim - 3 + num_axes]
        fits = states.ndim == 3 and arrays[name].shape == expected
        if not fits or arrays[name].dtype.kind not in kinds:
            raise UserError(
                f"{file}: {name} has shape {arrays[name].shape} and dtype {arrays[name].dtype}; it "
                f"must be {'[B, T]' if num_axes == 2 else '[B]'} of {STATES} [B, T, D], and "
                f"{' or '.join(KINDS[kind] for kind in kinds)}."
            )
    if states.ndim == 2:
        arrays |= {STATES: states[None], MASK: mask[None]}
    return arrays


def _read_npz(file: pathlib.Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    with np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in names if name in arrays}


def _read_safetensors(file: pathlib.Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    with safe_open(str(file), framework="numpy") as tensors:
        present = set(tensors.keys())
        return {name: tensors.get_tensor(name) for name in names if name in present}
