"""The files of a checkpoint: written and read by Orbax, vouched for by our manifest.

A folder `<step>/` holds `state`, `meta` (format version, step, data position) and, once all of it
is on disk, `manifest.<process>.json` with size and SHA-256 of every file. Orbax alone restores
flipped bits without a word; a checkpoint without its manifest is a torn one.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from semrl_jax.errors import UserError
from semrl_jax.models import Params
from semrl_jax.training.state import DataPosition

FORMAT_VERSION = 2  # 1: manifests leave out files named manifest.*, which tensorstore has too


def checkpoint_steps(directory: pathlib.Path) -> list[int]:
    """Steps with an entry in a directory of checkpoints, sound or not, in order."""
    return sorted(
        int(entry.name)
        for entry in directory.iterdir()
        if re.fullmatch(r"0|[1-9][0-9]*", entry.name)
    )


def checkpoint_problem(folder: pathlib.Path) -> str:
    """What is wrong with a checkpoint, "" if nothing; reads all of it.

    Raises:
      UserError: if its files match their manifest, and it is of a newer format.
    """
    main = folder / "manifest.0.json"
    recorded = _read_object(main)
    if recorded is None:
        return f"{main} is missing or unreadable, so it was not completed"
    try:
        found = file_checksums(folder)
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    meta_file = folder / "meta" / "metadata"
    meta = _read_object(meta_file) or {}
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
    if not isinstance(meta.get("format_version"), int):
        return f"{meta_file} has no format_version"
    if meta["format_version"] > FORMAT_VERSION:
        raise UserError(
            f"checkpoint {folder} has format_version={meta['format_version']}, but this version "
            f"of semrl_jax reads up to {FORMAT_VERSION}; update semrl_jax."
        )
    if str(meta["step"]) != folder.name:
        return f"it is that of step {meta['step']}, under another name"
    for process in range(1, meta.get("num_processes", 1)):
        file = folder / f"manifest.{process}.json"
        if _read_object(file) != recorded:
            return f"{file} is missing or does not match {main.name}"
    return ""


def read_meta(folder: pathlib.Path) -> dict[str, Any]:
    """`format_version`, `step` and `position` of a sound checkpoint."""
    return json.loads((folder / "meta" / "metadata").read_text())


def check_structure(folder: pathlib.Path, abstract: Any, part: str = "") -> None:
    """UserError naming the first array in which a checkpoint and `abstract` differ.

    Args:
      folder: a sound checkpoint.
      abstract: tree of arrays, or of their shapes and dtypes.
      part: compare only arrays whose name starts so, as "params/".
    """
    with open_checkpointer() as checkpointer:
        metadata = checkpointer.metadata(folder).item_metadata["state"]
    stored, expected = (
        {
            name: f"{leaf.dtype}{list(leaf.shape)}"
            for name, leaf in ocp.tree.to_flat_dict(tree, sep="/").items()
            if name.startswith(part)
        }
        for tree in (metadata.tree, abstract)
    )
    # Parameters first: the optimiser's arrays differ because theirs do.
    for name in sorted(stored.keys() | expected.keys(), key=lambda n: (n[:7] != "params/", n)):
        there, here = stored.get(name, "missing"), expected.get(name, "missing")
        if there != here:
            raise UserError(
                f"checkpoint {folder} is of another model: {name} is {there} there and {here} "
                "here; restore the setting or name another directory."
            )


def save_params(folder: pathlib.Path, params: Params) -> None:
    """Writes a sealed checkpoint of parameters alone; its step is the name of the folder."""
    with open_checkpointer() as checkpointer:
        checkpointer.save(
            folder, args=save_args({"params": params}, int(folder.name), DataPosition(0, 0))
        )
        checkpointer.wait_until_finished()
    write_manifest(folder)


def restore_params(folder: pathlib.Path, like: Params) -> Params:
    """The parameters of a sound checkpoint, be there a whole train state or not.

    Args:
      folder: its files have been compared with the manifest.
      like: parameters of its shapes; arrays or their shapes and dtypes.

    Raises:
      UserError: if the parameters have other names, shapes or dtypes than `like`.
    """
    check_structure(folder, {"params": like}, "params/")
    return restore_tree(folder, {"params": like})["params"]


def restore_tree(folder: pathlib.Path, like: Any) -> Any:
    """The arrays of `like` from a checkpoint that has at least those.

    Args:
      folder: its files have been compared with the manifest, its structure with `like`.
      like: tree of arrays, or of shapes and dtypes; with a sharding where it is to lie so.
    """
    abstract = jax.tree.map(_abstract, like)
    state = ocp.args.PyTreeRestore(
        abstract,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
        partial_restore=True,
    )
    with open_checkpointer() as checkpointer:
        return checkpointer.restore(folder, args=ocp.args.Composite(state=state)).state


def file_checksums(folder: pathlib.Path) -> dict[str, list]:
    """[size in bytes, hex SHA-256] of every file of a checkpoint, our manifests left out."""
    sums = {}
    for file in sorted(folder.rglob("*")):
        ours = file.parent == folder and re.fullmatch(r"manifest\.\d+\.(json|writing)", file.name)
        if file.is_dir() or ours:
            continue
        size, digest = file.stat().st_size, ""
        if file.is_file():  # nothing is read from a pipe or a device
            with open(file, "rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
        sums[str(file.relative_to(folder))] = [size, digest]
    return sums


def write_manifest(folder: pathlib.Path) -> None:
    """Vouches for the files of a checkpoint as they are now; durable when this returns."""
    manifest = folder / f"manifest.{jax.process_index()}.json"
    staging = manifest.with_suffix(".writing")
    with open(staging, "w") as out:
        out.write(json.dumps(file_checksums(folder), indent=1) + "\n")
        out.flush()
        os.fsync(out.fileno())
    staging.rename(manifest)
    # The names, too: older checkpoints are removed on the strength of this one.
    for directory in (folder, folder.parent):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_checkpointer(
    barrier: Callable[..., None] | None = None,
) -> ocp.AsyncCheckpointer:
    """Reads and writes folders of `state` and `meta`; a context manager.

    Args:
      barrier: of `key` and `timeout_ms`, waits for all processes to have written; None: Orbax's,
        which does not learn of a process that failed.
    """
    return ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(
            # zstd takes 8 % off float32 parameters and doubles the time to save them; reading them
            # back takes three times as long.
            state=ocp.PyTreeCheckpointHandler(use_compression=False),
            meta=ocp.JsonCheckpointHandler(),
        ),
        async_options=ocp.AsyncOptions(barrier_sync_fn=barrier),
    )


def save_args(tree: Any, step: int, position: DataPosition) -> ocp.args.Composite:
    meta = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "position": {"epoch": position.epoch, "cursor": position.cursor},
        "num_processes": jax.process_count(),
    }
    return ocp.args.Composite(state=ocp.args.PyTreeSave(tree), meta=ocp.args.JsonSave(meta))


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _read_object(file: pathlib.Path) -> Mapping[str, Any] | None:
    """The JSON object in a file; None if there is none."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
