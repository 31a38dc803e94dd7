"""The files of a checkpoint: written and read by Orbax, verified with our manifest.

A folder `<step>/` holds `state` and `meta` (format version, step, data position). When all of it is
on disk, `manifest.<process>.json` is added, with size and SHA-256 of every file. Orbax alone would
restore flipped bits without an error. A checkpoint without its manifest is incomplete.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import pathlib
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint._src import asyncio_utils

from semrl_jax.models import Params
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import read_json_object, write_json
from semrl_jax.training.train_state import DataPosition

WRITES_TIMEOUT_S = 30.0  # for the remaining writes of a failed save
META_FILE = pathlib.Path("meta", "metadata")
FORMAT_VERSION = 2  # in 1, manifests leave out all files named manifest.*, tensorstore's too


class UnreadableError(UserError):
    """A checkpoint matches its manifest but cannot be read."""

    def __init__(self, folder: pathlib.Path, error: Exception):
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        super().__init__(
            f"checkpoint {folder} matches its manifest, but cannot be read ({reason}); update "
            "semrl_jax and its packages, or move the checkpoint away to use an older one."
        )


def checkpoint_steps(directory: pathlib.Path) -> list[int]:
    """Sorted steps that have an entry in a directory of checkpoints, valid or not."""
    return sorted(
        int(entry.name)
        for entry in directory.iterdir()
        if re.fullmatch(r"0|[1-9][0-9]*", entry.name)
    )


def checkpoint_problem(folder: pathlib.Path) -> str:
    """Reads a whole checkpoint; what is wrong with it, or "". UserError for a newer format."""
    main = folder / "manifest.0.json"
    recorded = _read_object(main)
    if recorded is None:
        return f"{main} is missing or unreadable, so it was not completed"
    try:
        found = file_checksums(folder)
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    meta = _read_object(folder / META_FILE) or {}
    if meta.get("format_version") == 1:
        found = {
            name: sums
            for name, sums in found.items()
            if not pathlib.PurePath(name).name.startswith("manifest.")
        }
    for name in sorted(recorded.keys() | found.keys()):
        if name not in found:
            return f"{folder / name} is missing"
        if name not in recorded:
            return f"{folder / name} is not in its manifest"
        if found[name] != recorded[name]:
            return f"{folder / name} has been altered"
    if not _is_count(meta.get("format_version"), 1):
        return f"{folder / META_FILE} has no format_version"
    if meta["format_version"] > FORMAT_VERSION:
        raise UserError(
            f"checkpoint {folder} has format_version={meta['format_version']}; update semrl_jax."
        )
    position = meta.get("position")
    if not (
        _is_count(meta.get("step"))
        and _is_count(meta.get("num_processes", 1), 1)
        and isinstance(position, dict)
        and position.keys() == set(DataPosition._fields)
        and all(map(_is_count, position.values()))
    ):
        return f"{folder / META_FILE} lacks a field, or one is not a whole number"
    if str(meta["step"]) != folder.name:
        return f"it is that of step {meta['step']}, under another name"
    for process in range(1, meta.get("num_processes", 1)):
        file = folder / f"manifest.{process}.json"
        if _read_object(file) != recorded:
            return f"{file} is missing or does not match {main.name}"
    return ""


def read_meta(folder: pathlib.Path) -> dict[str, Any]:
    """`format_version`, `step` and `position` of a valid checkpoint, and what a run adds."""
    return read_json_object(folder / META_FILE)


def check_structure(folder: pathlib.Path, abstract: Any, part: str = "") -> None:
    """UserError if a valid checkpoint holds other arrays than `abstract`, below `part`."""
    tree = stored_shapes(folder)
    stored, expected = (
        {
            name: f"{leaf.dtype}{list(leaf.shape)}"
            for name, leaf in ocp.tree.to_flat_dict(tree, sep="/").items()
            if name.startswith(part)
        }
        for tree in (tree, abstract)
    )
    # Parameters first: if they differ, the optimiser's arrays differ as a consequence.
    for name in sorted(stored.keys() | expected.keys(), key=lambda n: (n[:7] != "params/", n)):
        there, here = stored.get(name, "missing"), expected.get(name, "missing")
        if there != here:
            raise UserError(
                f"checkpoint {folder} is of another model: {name} is {there} there and {here} "
                "here; restore the setting or name another directory."
            )


def stored_shapes(folder: pathlib.Path) -> Any:
    """Shapes and dtypes of the arrays of a checkpoint; raises UnreadableError."""
    try:
        with open_checkpointer() as checkpointer:
            tree = checkpointer.metadata(folder.absolute()).item_metadata["state"].tree
            ocp.tree.to_flat_dict(tree, sep="/")
    except Exception as error:  # any error of Orbax here is caused by these files
        raise UnreadableError(folder, error) from error
    return tree


def save_params(folder: pathlib.Path, params: Params) -> None:
    """Writes a complete checkpoint of parameters only; its step is the name of the folder."""
    args = save_args({"params": params}, int(folder.name), DataPosition(0, 0))
    with open_checkpointer() as checkpointer:
        checkpointer.save(folder, args=args)
        checkpointer.wait_until_finished()
    write_manifest(folder)


def restore_params(folder: pathlib.Path, like: Params) -> Params:
    """The parameters of a valid checkpoint like `like`, from float32 or bfloat16; or UserError."""
    stored = like
    if "bfloat16" in {str(leaf.dtype) for leaf in jax.tree.leaves(stored_shapes(folder)["params"])}:
        stored = jax.tree.map(lambda leaf: _abstract(leaf, jnp.bfloat16), like)
    check_structure(folder, {"params": stored}, "params/")
    found = restore_tree(folder, {"params": stored})["params"]
    return jax.tree.map(lambda leaf, as_in: leaf.astype(as_in.dtype), found, like)


def restore_tree(folder: pathlib.Path, like: Any) -> Any:
    """The arrays of `like`, with its shardings, from a valid checkpoint that has at least these."""
    abstract = jax.tree.map(_abstract, like)
    state = ocp.args.PyTreeRestore(
        abstract,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
        partial_restore=True,
    )
    try:
        with open_checkpointer() as checkpointer:
            args = ocp.args.Composite(state=state)
            return checkpointer.restore(folder.absolute(), args=args).state
    except ValueError as error:  # from tensorstore, for bytes that are not an array
        raise UnreadableError(folder, error) from error


def _abstract(leaf: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=sharding)


def file_checksums(folder: pathlib.Path) -> dict[str, list]:
    """[size in bytes, hex SHA-256] of every file of a checkpoint except our manifests."""
    sums = {}
    for file in sorted(folder.rglob("*")):
        ours = file.parent == folder and re.fullmatch(r"manifest\.\d+\.(json|writing)", file.name)
        if file.is_dir() or ours:
            continue
        size, digest = file.stat().st_size, ""
        if file.is_file():  # do not read from a pipe or a device
            with open(file, "rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
        sums[str(file.relative_to(folder))] = [size, digest]
    return sums


def write_manifest(folder: pathlib.Path, *, of_all: bool = False) -> None:
    """Writes the manifest of a checkpoint's current files; it is on disk when this returns.

    With `of_all`, also the equal manifests of the other processes, which do not see these files.
    """
    sums = file_checksums(folder)
    for process in range(jax.process_count()) if of_all else (jax.process_index(),):
        write_json(folder / f"manifest.{process}.json", sums, durable=True)
    # Also sync the directories: older checkpoints are removed once this one is complete.
    for directory in (folder, folder.parent):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _let_failed_saves_end() -> None:
    """Makes Orbax wait for all writes of a save if one of them fails.

    Orbax 0.12 closes the loop of such a save at once. Each later write then prints a traceback.
    """
    run_in_loop = getattr(asyncio_utils, "_run_sync_via_new_loop", None)
    if run_in_loop is None:  # another version of Orbax
        return

    async def to_the_end(work: Coroutine) -> Any:
        try:
            return await work
        except BaseException:
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others, timeout=WRITES_TIMEOUT_S)
            raise

    asyncio_utils._run_sync_via_new_loop = lambda work: run_in_loop(to_the_end(work))


_let_failed_saves_end()


def open_checkpointer(
    barrier: Callable[..., None] | None = None, timeout_s: float = 600.0
) -> ocp.AsyncCheckpointer:
    """Reads and writes folders of `state` and `meta`.

    `barrier`, of `key` and `timeout_ms`, waits until all processes have written. None: Orbax's own,
    which does not notice a failed process. `timeout_s` is for a save with its barriers.
    """
    return ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(
            # zstd makes float32 parameters 8 % smaller, but saving takes twice as long and reading
            # three times as long.
            state=ocp.PyTreeCheckpointHandler(use_compression=False),
            meta=ocp.JsonCheckpointHandler(),
        ),
        async_options=ocp.AsyncOptions(barrier_sync_fn=barrier, timeout_secs=timeout_s),
    )


def save_args(
    tree: Any, step: int, position: DataPosition, extra: Mapping[str, Any] = {}
) -> ocp.args.Composite:
    meta = {
        **extra,
        "format_version": FORMAT_VERSION,
        "step": step,
        "position": position._asdict(),
        "num_processes": jax.process_count(),
    }
    return ocp.args.Composite(state=ocp.args.PyTreeSave(tree), meta=ocp.args.JsonSave(meta))


def _read_object(file: pathlib.Path) -> Mapping[str, Any] | None:
    """The JSON object in a file; None if there is none."""
    try:
        return read_json_object(file)
    except (FileNotFoundError, UserError):
        return None


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least
