"""Finds the run that a path belongs to, and its recorded responses. Loads no JAX."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import read_json_object

START = "start"  # in a run that began from another run: the model that it began with


def run_of(path: pathlib.Path) -> pathlib.Path | None:
    """The run directory that is this path or has it among its checkpoints, or None."""
    candidates = [path, *path.parents[1:2]] if path.parent.name == "checkpoints" else [path]
    return next((found for found in candidates if "run_id" in record_of(found)), None)


def names_run(path: str) -> bool:
    """Whether a path is a run, a checkpoint, one of launch.convert, or an adapter of PEFT."""
    if not path:
        return False
    directory = pathlib.Path(path)
    if directory.parent.name == "checkpoints" and directory.name.isdigit():
        return True
    if run_of(directory) is not None or (directory / "adapter_config.json").is_file():
        return True
    has_weights = any(directory.glob("*.safetensors"))
    return (directory / "checkpoints").is_dir() and not has_weights


def distinct_names(paths: Sequence[pathlib.Path]) -> list[str]:
    """The ends of different absolute paths, as short as they can be and still differ."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def record_of(directory: pathlib.Path) -> dict[str, Any]:
    """config.json of a directory; {} if it is missing or unreadable."""
    try:
        return read_json_object(directory / "config.json")
    except (OSError, UserError):
        return {}


def setting_of(run: pathlib.Path | None, section: str, field: str) -> Any:
    """A setting that a run recorded; None without a run, or if its record lacks the setting."""
    try:
        return None if run is None else record_of(run)["config"][section].get(field)
    except (KeyError, TypeError, AttributeError):
        return None


def recorded(path: pathlib.Path, kind: str) -> dict[int, pathlib.Path]:
    """The files of recorded responses by step, of kind "step" or "eval"; or UserError."""
    directory = path / "rollouts"
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error.strerror}.") from None
    found = {}
    for name in names:
        if step := re.fullmatch(rf"{kind}_(\d{{1,15}})\.parquet", name):
            found[int(step[1])] = directory / name
    return dict(sorted(found.items()))
