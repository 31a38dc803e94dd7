"""Saved hidden states: an .npz or .safetensors file with one batch of responses."""

from __future__ import annotations

import os
import pathlib

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float
from safetensors import safe_open

from semrl_jax.errors import UserError

STATES, MASK = "hidden_states", "response_mask"
DTYPES = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))


def read_states(
    path: str | os.PathLike[str],
) -> tuple[Float[np.ndarray, "B T D"], Bool[np.ndarray, "B T"]]:
    """Reads `hidden_states` and `response_mask` of a file.

    Args:
      path: .npz or .safetensors. `hidden_states` is [B, T, D], or [T, D] for one response, in
        float16, float32, float64 or, in safetensors, bfloat16; rows outside the mask may hold
        anything. `response_mask` is bool with its leading axes; without it every row counts.

    Returns:
      States in the dtype of the file, and the mask.

    Raises:
      UserError: naming the file and what is wrong with it.
    """
    file = pathlib.Path(path)
    if file.suffix not in (".npz", ".safetensors"):
        raise UserError(f"{file} must end in .npz or .safetensors.")
    if not file.is_file():
        raise UserError(f"{file} is no file.")
    try:
        arrays = _read_npz(file) if file.suffix == ".npz" else _read_safetensors(file)
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
            f"{file}: {MASK} has shape {mask.shape}; it must be {states.shape[:-1]}, the leading "
            f"axes of {STATES} {states.shape}."
        )
    if mask.dtype != bool:
        raise UserError(
            f"{file}: {MASK} has dtype {mask.dtype}; it must be bool, True on tokens that count."
        )
    return (states[None], mask[None]) if states.ndim == 2 else (states, mask)


def _read_npz(file: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in (STATES, MASK) if name in arrays}


def _read_safetensors(file: pathlib.Path) -> dict[str, np.ndarray]:
    with safe_open(str(file), framework="numpy") as tensors:
        names = set(tensors.keys())
        return {name: tensors.get_tensor(name) for name in (STATES, MASK) if name in names}
