"""Checkpoints: written by Orbax in the background, trusted only with a matching manifest.

`checkpoints/<step>/` holds `state`, `meta` (format version, step, data position) and, once all of
it is on disk, `manifest.<process>.json` with size and SHA-256 of every file. Orbax alone restores
flipped bits without a word; a checkpoint without its manifest is a torn one.

Orbax's CheckpointManager is not used: it removes old checkpoints before the new one has its
manifest, and reads metadata of every checkpoint, damaged ones too, before it can be asked anything.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from semrl_jax.errors import UserError
from semrl_jax.models import Params
from semrl_jax.training.state import DataPosition, TrainState

FORMAT_VERSION = 2  # 1: manifests leave out files named manifest.*, which tensorstore has too
TMP_MARK = ".orbax-checkpoint-tmp"  # in the names of directories that Orbax has not finished
REMOVED = ".removed"

# What a disk answers, and says in the text of errors that pass through tensorstore.
DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class Checkpoints:
    """Saves and restores the train state of one run.

    A save that the disk refuses does not end the run: it is said in one line, what was written is
    removed, and the next save tries again. `check` tells in the end whether the last one failed.

    Args:
      directory: made if missing; of this process alone.
      keep: newest checkpoints kept; older ones are removed after a newer one is sealed.
      every_steps: steps between two saves, see `due`; 0 leaves `extra_steps` and the last step.
      keep_every: multiples of this step are saved and kept for ever; 0: none.
      extra_steps: these steps are saved and kept for ever.
      warn: called with one line for each checkpoint that cannot be trusted or written; from
        another thread, too.

    Attributes:
      num_failed: saves the disk refused.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        keep: int,
        every_steps: int = 1,
        keep_every: int = 0,
        extra_steps: Iterable[int] = (),
        warn: Callable[[str], None] = warnings.warn,
    ):
        self.num_failed = 0
        self._directory = pathlib.Path(directory).absolute()
        self._keep = keep
        self._every_steps = every_steps
        self._keep_every = keep_every
        self._extra_steps = frozenset(extra_steps)
        self._warn = warn
        self._checkpointer = _checkpointer()
        self._sound: set[int] = set()  # steps sealed, or restored, by this attempt
        self._unsound: set[int] = set()  # steps found not to match their manifest
        self._sealing: threading.Thread | None = None
        self._defect: Exception | None = None  # not the disk's doing; raised by wait()
        self._failure: OSError | None = None  # of the last save, if the disk refused it
        # Pages of tracebacks for what is raised, too, and here becomes one line.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_not_of_orbax_failing)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._sweep()

    def due(self, step: int, num_steps: int) -> bool:
        """Whether the state after `step` of `num_steps` updates is to be saved."""
        return (
            step == num_steps
            or step in self._extra_steps
            or any(every and step % every == 0 for every in (self._every_steps, self._keep_every))
        )

    def save(self, state: TrainState) -> None:
        """Starts writing the state; arrays may be donated as soon as this returns."""
        self.wait()
        step = int(state.step)
        if step in self._sound:
            return
        self._sweep()
        # Left unsealed by a kill, or altered since: sealing it now would vouch for its files.
        self._remove(step)
        try:
            self._checkpointer.save(
                self._directory / str(step),
                args=_save_args(state._replace(position=None), step, state.position),
            )
        except Exception as error:
            self._failed(step, error)
            return
        self._sealing = threading.Thread(target=self._seal, args=(step,), name="seal-checkpoint")
        self._sealing.start()

    def restore(self, like: TrainState) -> TrainState | None:
        """The newest checkpoint whose files match their manifest, or None.

        Each newer one that cannot be trusted is named by `warn`, and so is a start from nothing
        because none can.

        Args:
          like: a state with the shapes, dtypes and shardings to restore into.

        Raises:
          UserError: if a sound checkpoint was written by a newer format, or holds a state of other
            names, shapes or dtypes than `like`.
        """
        self.wait()
        abstract = jax.tree.map(_abstract, like._replace(position=None))
        steps = checkpoint_steps(self._directory)
        for step in reversed(steps):
            folder = self._directory / str(step)
            problem = checkpoint_problem(folder)
            if not problem:
                meta = read_meta(folder)
                try:
                    check_structure(folder, abstract)
                    state = self._checkpointer.restore(
                        folder,
                        args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)),
                    ).state
                except UserError:
                    raise
                except Exception as error:
                    if meta["format_version"] > 1:
                        raise
                    # Format 1 leaves tensorstore's own manifests out of ours.
                    problem = f"it cannot be read ({_first_line(error)})"
            if problem:
                self._unsound.add(step)
                self._warn(f"checkpoint {step} is not used: {problem}.")
                continue
            self._sound.add(step)
            return state._replace(position=DataPosition(**meta["position"]))
        if steps:
            self._warn(
                f"none of the {len(steps)} checkpoints in {self._directory} can be trusted: the "
                "run starts again from step 0."
            )
        return None

    def wait(self) -> None:
        """Returns when the last save is sealed or has failed; raises a failure of other causes
        than the disk."""
        if self._sealing is not None:
            self._sealing.join()
            self._sealing = None
        if self._defect is not None:
            defect, self._defect = self._defect, None
            raise defect

    def check(self) -> None:
        """Waits for the last save; OSError if the disk refused it."""
        self.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def _seal(self, step: int) -> None:
        try:
            self._checkpointer.wait_until_finished()
            write_manifest(self._directory / str(step))
            self._sound.add(step)
            self._unsound.discard(step)
            self._failure = None
            self._prune()
        except Exception as error:  # handed to the thread that asks, by wait() or check()
            self._failed(step, error)

    def _prune(self) -> None:
        """Removes what need not be kept; only called when a checkpoint has just been sealed.

        An unsound one counts for nothing and goes as soon as a newer one is sound. Those before
        the restored one were not looked at and count as sound: `keep` newer ones are.
        """
        steps = [step for step in checkpoint_steps(self._directory) if step not in self._unsound]
        kept = self._extra_steps.union(
            steps[-self._keep :],
            (step for step in steps if self._keep_every and step % self._keep_every == 0),
        )
        overtaken = (step for step in self._unsound if step < max(self._sound))
        for step in (set(steps) - kept).union(overtaken):
            self._remove(step)
            self._sound.discard(step)
        self._unsound = {step for step in self._unsound if step > max(self._sound)}

    def _remove(self, step: int) -> None:
        """Removes a checkpoint, if it is there."""
        folder = self._directory / str(step)
        if folder.exists():
            # One rename first: a kill in the middle must not leave half a checkpoint.
            removed = folder.with_name(folder.name + REMOVED)
            _delete(removed)
            folder.rename(removed)
            _delete(removed)

    def _sweep(self) -> bool:
        """Removes what a kill or a failed save left half-written; False if some of it resists."""
        for entry in self._directory.iterdir():
            if TMP_MARK in entry.name or entry.name.endswith(REMOVED):
                try:
                    _delete(entry)
                except OSError:
                    return False
        return True

    def _failed(self, step: int, error: Exception) -> None:
        refusal = disk_refusal(error)
        if refusal is None:
            self._defect = error
            return
        self.num_failed += 1
        # The old one would tell the next save of errors of this one.
        failed, self._checkpointer = self._checkpointer, _checkpointer()
        with contextlib.suppress(Exception):
            failed.close()
        self._remove(step)
        # Other threads of Orbax may go on writing for a moment; what they leave later goes at the
        # next save or start.
        for _ in range(20):
            if self._sweep():
                break
            time.sleep(0.1)
        free_mib = shutil.disk_usage(self._directory).free / 2**20
        good = f"step {max(self._sound)}" if self._sound else "none"
        self._failure = OSError(
            refusal.errno,
            f"the checkpoint of step {step} could not be written: {refusal.strerror} "
            f"({free_mib:.0f} MiB free in {self._directory}; last good checkpoint: {good})",
        )
        self._warn(f"{self._failure.strerror}; the next one tries again.")


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
    with _checkpointer() as checkpointer:
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
    with _checkpointer() as checkpointer:
        checkpointer.save(
            folder, args=_save_args({"params": params}, int(folder.name), DataPosition(0, 0))
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
    abstract = {"params": jax.tree.map(_abstract, like)}
    check_structure(folder, abstract, "params/")
    handler = ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler())
    with ocp.Checkpointer(handler) as checkpointer:
        state = ocp.args.PyTreeRestore(
            abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=True,
        )
        return checkpointer.restore(folder, args=ocp.args.Composite(state=state)).state["params"]


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


def disk_refusal(error: BaseException | None) -> OSError | None:
    """The disk's answer behind an error of a write; None if something else went wrong.

    tensorstore's errors are ValueErrors with the system's words in their text.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return OSError(error.errno, os.strerror(error.errno))
        for number in DISK_ERRNOS:
            if os.strerror(number) in str(error):
                return OSError(number, os.strerror(number))
        error = error.__cause__ or error.__context__
    return None


def _is_not_of_orbax_failing(record: logging.LogRecord) -> bool:
    source = record.pathname + record.getMessage()
    return record.levelno < logging.ERROR or "orbax" not in source


def _checkpointer() -> ocp.AsyncCheckpointer:
    return ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(
            state=ocp.StandardCheckpointHandler(), meta=ocp.JsonCheckpointHandler()
        )
    )


def _save_args(tree: Any, step: int, position: DataPosition) -> ocp.args.Composite:
    meta = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "position": {"epoch": position.epoch, "cursor": position.cursor},
        "num_processes": jax.process_count(),
    }
    return ocp.args.Composite(state=ocp.args.StandardSave(tree), meta=ocp.args.JsonSave(meta))


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _read_object(file: pathlib.Path) -> Mapping[str, Any] | None:
    """The JSON object in a file; None if there is none."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _delete(path: pathlib.Path) -> None:
    """Removes a file or a directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
