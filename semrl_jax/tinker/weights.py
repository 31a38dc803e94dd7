"""Directories of weights: tinker://MODEL/FOLDER/NAME is ROOT/MODEL/FOLDER/NAME."""

from __future__ import annotations

import contextlib
import datetime
import pathlib
import re
import threading
from collections.abc import Iterable
from typing import Any

from semrl_jax.support.safe_files import remove

WEIGHTS, SAMPLERS, SNAPSHOTS = "weights", "sampler_weights", "snapshots"  # folders of a model
UNNAMED = "unnamed-"  # begins the names of weights that only a sampling session knows
_SCHEME = "tinker://"
_TYPES = {WEIGHTS: "training", SAMPLERS: "sampler"}
_PATH = re.compile(
    rf"{_SCHEME}([\w:-]{{1,128}})/({WEIGHTS}|{SAMPLERS})/([\w-][\w.-]{{0,127}})", re.ASCII
)
_REPLACED, _WRITING = ".replaced", ".writing"  # suffixes of `replacing_directory`
changing = threading.Lock()  # of the threads that save and delete, which share these names


def is_ours(name: str) -> bool:
    """Whether a directory of this name may be hidden, replaced or removed by the server itself."""
    return name.startswith(UNNAMED) or name.endswith((_REPLACED, _WRITING))


def path_of(model: str, folder: str, name: str) -> str:
    """The path that clients know a directory by."""
    return f"{_SCHEME}{model}/{folder}/{name}"


def find(root: pathlib.Path, path: str) -> pathlib.Path:
    """The directory of a path; raises ValueError if there is none."""
    found = _PATH.fullmatch(path)
    directory = root.joinpath(*found.groups()) if found else None
    if directory is None or not directory.is_dir():
        raise ValueError(f"path={path!r:.300} does not exist on this server.")
    return directory


def delete(root: pathlib.Path, path: str) -> None:
    """Removes a directory in one step, as readers see it; raises as `find`."""
    with changing:
        directory = find(root, path)
        old = directory.with_name(directory.name + _REPLACED)
        remove(old)
        directory.rename(old)
        remove(old)


def checkpoints(root: pathlib.Path, model: str) -> list[dict[str, Any]]:
    """The named weights of a model as the SDK's `Checkpoint`, the newest first."""
    found = []
    for folder, kind in _TYPES.items():
        for directory in root.joinpath(model, folder).glob("*"):
            name = directory.name
            if is_ours(name):
                continue
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                files = [file.stat() for file in directory.iterdir()]
                found.append({
                    "checkpoint_id": f"{folder}/{name}",
                    "checkpoint_type": kind,
                    "time": timestamp(directory.stat().st_mtime),
                    "tinker_path": path_of(model, folder, name),
                    "size_bytes": sum(file.st_size for file in files),
                    "public": False,
                })  # fmt: skip
    return newest_first(found)


def newest_first(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda checkpoint: checkpoint["time"], reverse=True)


def timestamp(seconds: float) -> str:
    """A time as in RFC 3339."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
