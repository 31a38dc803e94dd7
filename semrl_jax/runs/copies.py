"""Copies of a run in a bucket or on another disk, for a run that loses its own disk.

A copy is a run directory too: the files of the run and its newest checkpoints. Its checkpoint is
complete when its `manifest.0.json`, which is written last, is there. Every store that fsspec knows
can hold copies. Orbax 0.12 itself can write to gs://, but not to s3://, and rows and settings would
still be lost with the disk.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import pathlib
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import parse_json, remove

T = TypeVar("T")
RESTORING = ".restoring"  # in a run directory whose files are still on their way from the copy
PROBE = ".writable"
CHECKPOINTS = "checkpoints"
ANSWERS = "answers"  # of environments
MANIFEST = "manifest.0.json"
# Files of this machine, and files that each start makes again.
NOT_COPIED = (CHECKPOINTS, "tensorboard", "wandb", "profile", "given", ".lock", RESTORING, PROBE)
CHANGING = (".jsonl", ".html", ".png")  # all other files are written once
UNFINISHED = (".writing", ".replaced", ".removed")
MAX_AT_ONCE = 8  # files on their way: each may hold some parts of 50 MB in memory
SLASH = "/"


class StoreError(OSError):
    """A store did not do what it was asked; the message is its reason, in one line."""

    def __init__(self, reason: str):
        super().__init__(errno.EIO, reason)

    def __str__(self) -> str:
        return self.strerror


def _named(method: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(method)
    def call(*args: Any) -> T:
        try:
            return method(*args)
        except UserError:
            raise
        except Exception as error:  # each store has exceptions of its own
            text = " ".join(str(error).split())[:200]
            raise StoreError(f"{type(error).__name__}: {text}" if text else repr(error)) from error

    return call


class Store:
    """A directory in an object store or on another disk; names of files are relative to it.

    All methods raise StoreError. UserError for an address that names no store, or whose package is
    missing.
    """

    def __init__(self, url: str):
        self.url = url.rstrip(SLASH) or SLASH
        if re.match(r"\w+(:(?!//)|//)", self.url):  # s3:/bucket would be a directory here
            raise UserError(
                f"checkpoints.copy_to={url} is no address such as s3://BUCKET/NAME and no "
                "directory; change it."
            )
        # After an error, fsspec leaves the rest of the files.
        warnings.filterwarnings("ignore", "coroutine .*FileSystem.* was never awaited")
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs the errors that it raises
        self._is_disk = "://" not in url or url.startswith(("file://", "local://"))
        options = {"auto_mkdir": True} if self._is_disk else {}
        try:
            import fsspec  # here: only copies need it

            self._fs, self._root = fsspec.core.url_to_fs(self.url, **options)
        except ImportError as error:
            raise UserError(
                f"checkpoints.copy_to={url} needs another package ({error}): "
                "pip install 'semrl_jax[buckets]'."
            ) from None
        except Exception as error:  # each store checks its addresses and credentials in its own way
            raise UserError(f"checkpoints.copy_to={url} cannot be used: {error}.") from None

    def overlaps(self, run: pathlib.Path) -> bool:
        """Whether this is a run directory, in it, or around it."""
        here, run = pathlib.Path(self._root).resolve(), run.resolve()
        return self._is_disk and (here.is_relative_to(run) or run.is_relative_to(here))

    @_named
    def check_writable(self) -> None:
        self._fs.pipe_file(self._path(PROBE), b"\n")
        self._fs.rm_file(self._path(PROBE))

    @_named
    def sizes(self, below: str = "") -> dict[str, int]:
        """Size in bytes of each file by name; only those in the directory `below`, if given."""
        self._fs.invalidate_cache()
        root = self._path(below) if below else self._root
        found = self._fs.find(root, detail=True)
        start = len(self._root.rstrip(SLASH)) + 1
        names = {path[start:]: info["size"] for path, info in found.items()}
        return {name: size for name, size in names.items() if _is_plain(name)}

    @_named
    def read(self, name: str) -> bytes:
        return self._fs.cat_file(self._path(name))

    @_named
    def write(self, name: str, content: bytes) -> None:
        """Writes a file whole or not at all."""
        path = self._path(name)
        if not self._is_disk:  # an object is replaced at once
            self._fs.pipe_file(path, content)
            return
        self._fs.pipe_file(f"{path}.writing", content)
        self._fs.mv(f"{path}.writing", path)

    @_named
    def put(self, files: Mapping[str, pathlib.Path]) -> None:
        """Writes files from this machine, by name."""
        self._move(self._fs.put, [str(file) for file in files.values()], self._paths(files))

    @_named
    def get(self, files: Mapping[str, pathlib.Path]) -> None:
        """Reads files to this machine, by name."""
        for file in files.values():
            file.parent.mkdir(parents=True, exist_ok=True)
        self._move(self._fs.get, self._paths(files), [str(file) for file in files.values()])

    @_named
    def remove_checkpoint(self, step: int) -> None:
        """Removes what there is of it, its manifest first."""
        folder = self._path(f"{CHECKPOINTS}/{step}")
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{folder}/{MANIFEST}")
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(folder, recursive=True)
        self._fs.invalidate_cache()

    @_named
    def remove(self, names: Sequence[str]) -> None:
        if names:
            self._fs.rm(self._paths(names))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip(SLASH)}/{name}"

    def _paths(self, names: Iterable[str]) -> list[str]:
        return [self._path(name) for name in names]

    def _move(self, move: Callable[..., Any], sources: list[str], targets: list[str]) -> None:
        if sources:
            options = {"batch_size": MAX_AT_ONCE} if self._fs.async_impl else {}
            move(sources, targets, **options)


def _is_plain(name: str) -> bool:
    """Whether a name of a store is that of a whole file below the directory."""
    is_whole = name != PROBE and not name.endswith(UNFINISHED)  # a kill may leave others
    return is_whole and not any(part in ("", ".", "..") for part in name.split(SLASH))


class Copy(NamedTuple):
    """The copy of a run."""

    record: dict[str, Any]  # its config.json
    step: int  # of its newest complete checkpoint; -1 if there is none


def find_copy(url: str, run: pathlib.Path, run_id: str, *, writes: bool = True) -> Copy | None:
    """The copy of a run directory, or None if there is none.

    UserError if the place cannot be used, or holds another run than `run_id`, if that is not empty.
    It is checked that the place can be written; without `writes`, only that it can be read.
    """
    store = Store(url)
    if store.overlaps(run):
        raise UserError(
            f"checkpoints.copy_to={url} must not be in the run directory {run} or around it; name "
            "another place."
        )
    try:
        if writes:
            store.check_writable()
        names = store.sizes()
        content = store.read("config.json") if "config.json" in names else b""
    except StoreError as error:
        raise UserError(
            f"checkpoints.copy_to={url} cannot be used ({error}); check address and credentials, "
            "or leave it empty."
        ) from None
    if not names:
        return None
    record = None
    with contextlib.suppress(ValueError):
        record = parse_json(content)
    if not (
        isinstance(record, dict)
        and isinstance(record.get("run_id"), str)
        and isinstance(record.get("config"), dict)
    ):
        raise UserError(
            f"checkpoints.copy_to={url} holds files, but no config.json of a run; name another "
            "place."
        )
    if run_id and record["run_id"] != run_id:
        raise UserError(f"checkpoints.copy_to={url} holds another run; name another place.")
    complete = (step for step in _steps(names) if f"{CHECKPOINTS}/{step}/{MANIFEST}" in names)
    return Copy(record, max(complete, default=-1))


def restore(url: str, run: pathlib.Path, say: Callable[[str], None]) -> None:
    """Writes the files of a copy and its newest valid checkpoint into a run directory.

    Existing files are replaced. UserError if the store fails. A kill leaves RESTORING behind.
    """
    from semrl_jax.runs.checkpoint_files import checkpoint_problem  # loads JAX

    store = Store(url)
    (run / RESTORING).touch()
    try:
        names = store.sizes()
        say(f"the run directory {run} is written from {url}")
        store.get(
            {name: run / name for name in names if name.partition(SLASH)[0] not in NOT_COPIED}
        )
        for step in reversed(_steps(names)):
            folder = run / CHECKPOINTS / str(step)
            if f"{CHECKPOINTS}/{step}/{MANIFEST}" not in names:
                continue  # the copy was not completed
            if not checkpoint_problem(folder):
                break  # this disk has a good one
            remove(folder)
            store.get({name: run / name for name in names if _step_of(name) == step})
            problem = checkpoint_problem(folder)
            if not problem:
                break
            say(f"the copy of checkpoint {step} is not used: {problem}.")
            remove(folder)
    except StoreError as error:
        raise UserError(
            f"checkpoints.copy_to={url} cannot be read ({error}); start again when it can."
        ) from None
    (run / RESTORING).unlink()


class Copies:
    """Copies a run in the background, after its checkpoints; the run goes on if that fails.

    Args:
      url: where to; see `Store`.
      run: the run directory.
      kept: the steps to keep, of all steps of which there are copies.
      warn: gets a line for each failure, from another thread.
      apart: whether each process has a disk of its own. Then all processes have their copies, and
        give each other through the store what they write of a checkpoint (`send`, `fetch`).
    """

    def __init__(
        self,
        url: str,
        run: pathlib.Path,
        kept: Callable[[list[int]], set[int]],
        warn: Callable[[str], None],
        *,
        apart: bool = False,
    ):
        self._store, self._run, self._kept, self._warn = Store(url), run, kept, warn
        self._apart = apart
        self._began_ns = time.time_ns()
        self._lock = threading.Lock()  # guards the four fields below
        self._due: int | None = None  # the checkpoint to copy next
        self._busy: int | None = None  # the one that is being copied
        self._worker: threading.Thread | None = None
        self._last: int | None = None  # the newest one that was to be copied, and was not yet
        self._saving: int | None = None  # the one that other processes are sending
        self._copied: dict[str, tuple[int, int]] = {}  # size and time of files, when copied

    def offer(self, step: int) -> None:
        """Copies a checkpoint that is complete, unless a newer one comes before it is its turn."""
        with self._lock:
            self._due = self._last = step
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="copies", daemon=True)
                self._worker.start()

    def expect(self, step: int) -> None:
        """Makes `close` copy the newest checkpoint of earlier attempts, if they could not."""
        with self._lock:
            self._last = step

    @property
    def in_use(self) -> set[int]:
        """Steps of checkpoints that are to be copied."""
        with self._lock:
            return {step for step in (self._due, self._busy) if step is not None}

    def clear(self, step: int) -> None:
        """Removes a copy of a checkpoint that is about to be written; raises StoreError."""
        self._saving = step
        self._store.remove_checkpoint(step)

    def send(self, step: int, files: Mapping[str, pathlib.Path]) -> None:
        """Copies what a process has written of a checkpoint, by name in it; raises StoreError."""
        self._store.put({f"{CHECKPOINTS}/{step}/{name}": file for name, file in files.items()})

    def fetch(self, step: int, place: Callable[[str], pathlib.Path]) -> None:
        """Reads all files of a checkpoint to their `place` by name in it; raises StoreError."""
        folder = f"{CHECKPOINTS}/{step}"
        names = self._store.sizes(folder)
        self._store.get({name: place(name.removeprefix(f"{folder}/")) for name in names})

    def publish(self, step: int) -> None:
        """Copies a checkpoint now, if it is not there; raises StoreError."""
        self._copy(step)

    def close(self) -> None:
        """Waits for the copy, and copies what the end of the run has written.

        Nothing is copied before the first checkpoint: a start that failed leaves no copy.
        """
        with self._lock:
            worker = self._worker
        if worker is not None:
            worker.join()
        if self._copied or self._last is not None:
            self._try(self._last, "; the same command tries again")

    def _work(self) -> None:
        while True:
            with self._lock:
                step = self._busy = self._due
                self._due = None
                if step is None:
                    self._worker = None
                    return
            self._try(step, "; the next checkpoint tries again")

    def _try(self, step: int | None, what_next: str) -> None:
        try:
            self._copy(step)
            with self._lock:
                self._last = None if self._last == step else self._last
        except OSError as error:  # StoreError, and errors of this disk
            what = "the files of the run" if step is None else f"checkpoint {step}"
            self._warn(f"{what} could not be copied to {self._store.url} ({error}){what_next}")

    def _copy(self, step: int | None) -> None:
        """Copies the files of the run, then a checkpoint, and removes what need not be kept."""
        # Listed first: the run drops more of them when a newer checkpoint is complete.
        answers = {f"{ANSWERS}/{file.name}" for file in (self._run / ANSWERS).glob("*")}
        there = self._store.sizes()
        self._claim(there)
        # A checkpoint in the copy may need these until the newer one is there.
        needless = [name for name in there if name.startswith(f"{ANSWERS}/") if name not in answers]
        complete = [n for n in _steps(there) if f"{CHECKPOINTS}/{n}/{MANIFEST}" in there]
        for other in _steps(there) if step is not None else ():
            # Later ones belong to a future that this run has lost: its rows are about to be
            # replaced. Incomplete ones only need room.
            is_needless = other > step or (other < step and other not in complete)
            if is_needless and other != self._saving:
                self._store.remove_checkpoint(other)
        self._copy_files(there)
        if step is None:
            return self._store.remove(needless)
        folder = self._run / CHECKPOINTS / str(step)
        own = {
            str(pathlib.PurePosixPath(CHECKPOINTS, str(step), file.relative_to(folder))): file
            for file in folder.rglob("*")
            if file.is_file()
        }
        manifest = f"{CHECKPOINTS}/{step}/{MANIFEST}"
        if manifest not in own:  # another process could not complete it
            return
        same = manifest in there and self._store.read(manifest) == own[manifest].read_bytes()
        if not same:
            last = own.pop(manifest).read_bytes()
            if self._apart:  # the others have sent theirs; what was there before has been removed
                own = {n: file for n, file in own.items() if there.get(n) != file.stat().st_size}
            else:
                self._store.remove_checkpoint(step)
            self._store.put(own)
            self._store.write(manifest, last)
        steps = [*(other for other in complete if other < step), step]
        for other in set(steps) - self._kept(steps):
            self._store.remove_checkpoint(other)
        self._store.remove(needless)

    def _claim(self, there: Mapping[str, int]) -> None:
        """Writes config.json, which tells whose files these are; StoreError if it is another's."""
        record = (self._run / "config.json").read_bytes()
        if "config.json" not in there:
            self._store.write("config.json", record)
        elif self._store.read("config.json") != record:
            raise StoreError("it holds another run")

    def _copy_files(self, there: Mapping[str, int]) -> None:
        changed = {}
        for name, file in _files(self._run):
            try:
                state = file.stat().st_size, file.stat().st_mtime_ns
                is_old = state[1] < self._began_ns and file.suffix not in CHANGING
                is_same = self._copied.get(name) == state and name in there
                if is_same or (is_old and there.get(name) == state[0]):
                    continue
                if file.suffix == ".jsonl":  # they grow: only whole lines are copied
                    content = file.read_bytes()
                    self._store.write(name, content[: content.rfind(b"\n") + 1])
                    self._copied[name] = state
                else:
                    changed[name] = file, state
            except FileNotFoundError:  # answers that are no longer needed
                continue
        self._store.put({name: file for name, (file, _) in changed.items()})
        self._copied |= {name: state for name, (_, state) in changed.items()}


def _files(run: pathlib.Path) -> list[tuple[str, pathlib.Path]]:
    """The files of a run directory that belong to a copy, except checkpoints, by name."""
    found = []
    for entry in sorted(run.iterdir()):
        if entry.name in NOT_COPIED or re.fullmatch(r"(replica|process)\d+(_\d+)?", entry.name):
            continue
        for file in [entry] if entry.is_file() else sorted(entry.rglob("*")):
            name = file.relative_to(run)
            if file.is_file() and not any(part.endswith(UNFINISHED) for part in name.parts):
                found.append((name.as_posix(), file))
    return found


def _step_of(name: str) -> int | None:
    """The step of the checkpoint that a file of a copy belongs to."""
    found = re.match(rf"{CHECKPOINTS}/(0|[1-9][0-9]*)/", name)
    return None if found is None else int(found[1])


def _steps(names: Iterable[str]) -> list[int]:
    return sorted({step for name in names if (step := _step_of(name)) is not None})
