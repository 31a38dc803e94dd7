"""The directory of a run: its lock, the record of its settings, its files."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import os
import pathlib
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import ml_collections

from configs.default import get_config
from semrl_jax.cluster import find_place
from semrl_jax.cluster.agreement import on_first, run_phase
from semrl_jax.cluster.peers import Peers
from semrl_jax.runs.copies import ANSWERS, CHECKPOINTS, RESTORING, find_copy, restore
from semrl_jax.runs.forks import Fork, find_fork, write_fork
from semrl_jax.settings.config import known_settings
from semrl_jax.settings.moved import REMOVED, with_present_names
from semrl_jax.settings.rules import flatten
from semrl_jax.support.errors import UserError
from semrl_jax.support.run_directory import START, record_of
from semrl_jax.support.safe_files import (
    check_plain,
    jsonable,
    read_json_object,
    remove,
    through_no_link,
    write_json,
)

# These decide what a run's checkpoints hold. A run from before they existed keeps their default.
IN_CHECKPOINTS = (
    "rollout.max_staleness", "lora.rank", "data.curriculum", "training.resume_from",
)  # fmt: skip
OPTIONS = "optimizer.options."  # of which a run records only those that it has
GIVEN = "given"  # rows and functions that a program gave to the run
DIRECTORIES = (CHECKPOINTS, ANSWERS, "rollouts", "records", "tensorboard")  # maybe linked elsewhere
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy", "grpcio")


@dataclasses.dataclass(frozen=True)
class Workdir:
    """A run directory that this process has locked."""

    path: pathlib.Path
    run_id: str  # the same in all attempts
    attempt_id: str  # new for every start
    resumed: bool  # whether there was an earlier attempt
    changed: tuple[str, ...]  # settings that differ from the first attempt's: "field: old -> new"
    lock: Any  # closing it releases the directory
    made: tuple[pathlib.Path, ...] = ()  # directories of this attempt; the run's own is first
    shared: bool = True  # by all processes; if not, `path` of others is in their own directory

    def check_inputs(self, hashes: dict[str, str]) -> None:
        """Records hashes by name of the run's inputs; UserError at a later start if one changed."""
        file = self.path / "inputs.json"
        try:
            recorded = read_json_object(file)
        except FileNotFoundError:
            write_json(file, hashes)
            return
        except UserError as error:
            raise UserError(
                f"{error} It records the inputs of the run; restore it or name a new workdir."
            ) from None
        _compare_inputs(self.path, recorded, hashes, self.changed)

    def discard(self, message: str = "") -> None:
        """Removes the files of this attempt if a user mistake stopped it before it had results.

        Nothing is removed after an earlier attempt, or if anything of value is there. A replica's
        directory that the message for the user names is kept.
        """
        contents = [] if self.resumed else list(self.path.iterdir())
        if not all(map(_is_worthless, contents)):
            return
        for path in contents:
            if not (path.name.startswith("replica") and str(path) in message):
                remove(path)
        for directory in self.made:
            with contextlib.suppress(OSError):  # not empty
                directory.rmdir()

    def close(self) -> None:
        self.lock.close()


def open_workdir(
    path: str, config: ml_collections.ConfigDict, say: Callable[[str], None] = print
) -> Workdir:
    """Makes or reopens a run directory and locks it; UserError if that cannot be.

    If the run, or a newer checkpoint of it, is only in `checkpoints.copy_to`, the directory is
    written from there, and a new one from `training.resume_from`. `say` gets lines about it.
    """
    directory = pathlib.Path(path).absolute()
    settings = jsonable(config.to_dict())
    config_file = directory / "config.json"
    with contextlib.ExitStack() as stack:
        with _named_errors(path):
            _check_contents(path, directory, settings)  # before anything is made
            is_behind = _check_copy(path, directory, config)
            fork = None if is_behind else _fork_for(path, directory, settings)
            made = tuple(d for d in (directory, *directory.parents) if not d.exists())
            directory.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(directory / ".lock", "a", opener=through_no_link))
        _lock(path, lock)
        if is_behind:
            with _named_errors(path):
                restore(config.checkpoints.copy_to, directory, say)
        elif fork is not None:
            with _named_errors(path), _removed_unless_done(directory / ".lock", *made):
                say(f"the run directory {directory} is written from {fork.path}")
                write_fork(fork, directory, new_record(fork.settings))
        if resumed := config_file.exists():
            record = _read_record(config_file)
        else:
            record = new_record(settings)
            write_json(config_file, record)
        attempt_id = secrets.token_hex(8)
        lock.truncate(0)
        lock.write(attempt_id)
        lock.flush()
        os.fsync(lock.fileno())
        opened = Workdir(
            path=directory,
            run_id=record["run_id"],
            attempt_id=attempt_id,
            resumed=resumed,
            changed=_compare(f"workdir={path}", record["config"], settings),
            lock=lock,
            made=made,
        )
        stack.pop_all()  # the lock lasts as long as the run
        return opened


def check_early(path: str, config: ml_collections.ConfigDict) -> None:
    """UserError for a wrong directory, before the trainer is loaded; with one process only."""
    if find_place(config.distributed, os.environ).num_processes > 1:
        return
    directory = pathlib.Path(path).absolute()
    with _named_errors(path):
        settings = jsonable(config.to_dict())
        _check_contents(path, directory, settings)
        if not _check_copy(path, directory, config):
            _fork_for(path, directory, settings)


def check_workdir(path: str, config: ml_collections.ConfigDict, hashes: dict[str, str]) -> bool:
    """Whether a directory holds a run to resume; writes nothing, UserError as `open_workdir`."""
    directory = pathlib.Path(path).absolute()
    with _named_errors(path):
        settings = jsonable(config.to_dict())
        changed = _check_contents(path, directory, settings)
        is_behind = _check_copy(path, directory, config, writes=False)
        fork = None if is_behind else _fork_for(path, directory, settings)
        existing = next(d for d in (directory, *directory.parents) if d.exists())
        if not os.access(existing, os.W_OK):
            raise UserError(f"workdir={path} cannot be used: {existing} cannot be written to.")
        if (directory / ".lock").exists():
            with open(directory / ".lock", opener=through_no_link) as lock:
                _lock(path, lock)
        run = directory if fork is None else fork.run
        if (run / "inputs.json").exists():
            recorded = read_json_object(run / "inputs.json")
            _compare_inputs(run, recorded, hashes, changed)
        return is_behind or (run / "config.json").exists()


@contextlib.contextmanager
def _removed_unless_done(lock: pathlib.Path, *made: pathlib.Path) -> Iterator[None]:
    """After an error in the block, removes the lock file, and the empty directories."""
    try:
        yield
    except BaseException:
        remove(lock)
        for directory in made:
            with contextlib.suppress(OSError):  # not empty
                directory.rmdir()
        raise


@contextlib.contextmanager
def _named_errors(path: str) -> Iterator[None]:
    """Raises an error of the file system as a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"workdir={path} cannot be used: {error.strerror or error}.") from None


def _check_contents(path: str, directory: pathlib.Path, settings: Any) -> tuple[str, ...]:
    """The changed settings; UserError unless the directory is new, empty, or of such a run."""
    if "://" in path:
        raise UserError(
            f"workdir={path} must be a directory of a file system, with locks and renames; name "
            "one, and let checkpoints.copy_to copy it to the object store."
        )
    check_plain(f"workdir={path}", directory)
    if directory.exists() and not directory.is_dir():
        raise UserError(f"workdir={path} is a file; name a directory.")
    contents = [entry.name for entry in directory.iterdir()] if directory.exists() else []
    for name in DIRECTORIES:
        if name in contents and not (directory / name).is_dir():
            raise UserError(
                f"workdir={path}: {directory / name} must be a directory, and is a file or a link "
                "to a place that is not there; bring the place back, or remove it."
            )
    if RESTORING in contents:
        return ()
    if "config.json" in contents:
        record = _read_record(directory / "config.json")
        return _compare(f"workdir={path}", record["config"], settings)
    if not all(map(_is_left_by_a_start, contents)):
        raise UserError(
            f"workdir={path} is not empty and has no config.json of a run; name a new directory."
        )
    return ()


def _check_copy(
    path: str, directory: pathlib.Path, config: ml_collections.ConfigDict, *, writes: bool = True
) -> bool:
    """Whether the copy in `checkpoints.copy_to` must be restored; UserError if it cannot be used.

    It must if there is no run here, or if its newest complete checkpoint is newer than any here.
    """
    url, is_partial = config.checkpoints.copy_to, (directory / RESTORING).exists()
    run_id = record_of(directory).get("run_id", "")  # "" if only a part of it was written
    copy = find_copy(url, directory, run_id, writes=writes) if url else None
    if is_partial and copy is None and not config.training.resume_from:
        raise UserError(
            f"workdir={path} has only a part of the files of its copy; set checkpoints.copy_to or "
            "training.resume_from as before, or remove the directory."
        )
    if copy is None:
        return False
    _compare(f"checkpoints.copy_to={url}", copy.record["config"], jsonable(config.to_dict()))
    complete = directory.glob("checkpoints/*/manifest.0.json")
    steps = [int(file.parent.name) for file in complete if file.parent.name.isdigit()]
    return is_partial or not run_id or copy.step > max(steps, default=-1)


def _fork_for(path: str, directory: pathlib.Path, settings: Any) -> Fork | None:
    """The checkpoint that a new run continues from, with the run's settings; None if there is none.

    UserError if it cannot be used, or if these settings do not continue that run.
    """
    source = settings["training"]["resume_from"]
    is_whole = (directory / "config.json").exists() and not (directory / RESTORING).exists()
    if not source or is_whole:
        return None
    fork = find_fork(source)
    fork.settings["training"]["resume_from"] = source
    rewards = fork.settings.get("rewards")
    if (directory / GIVEN).is_dir() and isinstance(rewards, dict):
        # A program gives its functions to each of its runs.
        own = re.compile(rf".*/(?={GIVEN}/rewards\.pkl:)")
        place = os.path.join(path, "")
        rewards["function"] = own.sub(place, str(rewards.get("function", "")))
        rewards["functions"] = [own.sub(place, str(one)) for one in rewards.get("functions", ())]
    _compare(f"training.resume_from={source}", fork.settings, settings)
    return fork


def new_record(settings: Any) -> dict[str, Any]:
    """`config.json` of a new run with these settings, as JSON has them."""
    return {"run_id": secrets.token_hex(8), "config": settings, "versions": versions()}


def _lock(path: str, file: IO[str]) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A start that failed may just have removed the file, and the next start would lock another.
        if os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
            return
    raise UserError(
        f"workdir={path} belongs to a run that still runs; stop it or name another directory."
    )


def _compare_inputs(
    directory: pathlib.Path,
    recorded: dict[str, Any],
    hashes: dict[str, str],
    changed: Sequence[str],
) -> None:
    """Raises UserError if an input has changed since it was recorded; it names changed settings."""
    of_data = [line for line in changed if line.startswith(("data.", "sft."))]
    since = f"; changed since: {', '.join(of_data)}" if of_data else ""
    for name, value in hashes.items():
        if recorded.get(name, value) != value:
            raise UserError(
                f"the run in {directory} began with other {name} (see inputs.json); restore "
                f"the original, or begin a new run in another workdir{since}."
            )


def _read_record(file: pathlib.Path) -> dict[str, Any]:
    """Reads `config.json` of a run; UserError if it is not such a record."""
    try:
        record = read_json_object(file)
    except UserError as error:
        raise UserError(f"{error} It is not the record of a run; name another workdir.") from None
    if not isinstance(record.get("run_id"), str) or not isinstance(record.get("config"), dict):
        raise UserError(f"{file} is not the record of a run; name another workdir.")
    return record


def open_workdir_together(
    peers: Peers, path: str, config: ml_collections.ConfigDict, say: Callable[[str], None] = print
) -> Workdir:
    """The run directory in every process; only process 0 makes, locks and writes it.

    If some processes do not see it, each of the others gets a directory of its own. UserError then
    without `checkpoints.copy_to`, through which checkpoints get to all.
    """
    opened: list[Workdir] = []

    def open_first() -> dict[str, Any]:
        opened.append(open_workdir(path, config, say))
        names = ("run_id", "attempt_id", "resumed", "changed")
        return {name: getattr(opened[0], name) for name in names}

    record = on_first(peers, "open_workdir", open_first)
    if opened:
        workdir = opened[0]
    else:
        record["changed"] = tuple(record["changed"])
        workdir = Workdir(pathlib.Path(path).absolute(), lock=contextlib.ExitStack(), **record)
    try:
        seen = peers.gather("open_workdir", _is_seen(workdir))
        run_phase(peers, "open_workdir", lambda: _check_seen(seen, path, config))
        if not all(seen) and not opened:
            own = workdir.path / f"process{peers.index}"
            own.mkdir(parents=True, exist_ok=True)
            workdir = dataclasses.replace(workdir, path=own)
        return dataclasses.replace(workdir, shared=all(seen))
    except BaseException:
        if opened:
            workdir.discard()
            workdir.close()
        raise


def _is_left_by_a_start(name: str) -> bool:
    """Whether a failed start may leave a file of this name in a run directory."""
    # config.writing: of a kill during the first write; replica0, replica0_1: logs of replicas that
    # did not start; process1: of a process on this host that did not see the run directory.
    is_own = re.fullmatch(r"replica\d+(_\d+)?|process\d+", name) is not None
    return is_own or name in (".lock", "config.writing", GIVEN)


def _is_worthless(path: pathlib.Path) -> bool:
    """Whether a file of a run has no value for a later start."""
    if path.name == "checkpoints":
        return path.is_dir() and not any(path.iterdir())
    if path.name == "metrics.jsonl":
        return path.is_file() and not path.stat().st_size
    if path.name in (START, ANSWERS):  # START is a copy of another run's checkpoint
        return True
    return (
        path.name
        in ("config.json", "inputs.json", "weights.json", "starts.jsonl", "tensorboard", "wandb")
        or path.suffix == ".writing"
        or _is_left_by_a_start(path.name)
    )


def _is_seen(workdir: Workdir) -> bool:
    """Whether this process sees the run directory that process 0 has locked."""
    try:
        return (workdir.path / ".lock").read_text() == workdir.attempt_id
    except OSError:
        return False


def _check_seen(seen: Sequence[bool], path: str, config: ml_collections.ConfigDict) -> None:
    if not all(seen) and not config.checkpoints.copy_to:
        raise UserError(
            f"workdir={path} lacks the files of process 0 in process {seen.index(False)}; name a "
            "directory that all share, or a bucket in checkpoints.copy_to."
        )


def versions() -> dict[str, str]:
    """Package versions and the git revision of the code, "" outside a checkout or without git."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    here, command, revision = pathlib.Path(__file__).parent, ["git", "rev-parse", "HEAD"], ""
    if shutil.which("git"):  # images of containers may have none
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
        revision = done.stdout.strip()
    return found | {"git": revision}


def _compare(place: str, recorded: Any, settings: Any) -> tuple[str, ...]:
    """The changed settings; UserError, which begins with `place`, if one of them may not change."""
    old, new = with_present_names(flatten(recorded)), flatten(settings)
    named = old.keys()
    # A setting that is newer than the run had its default, and may have any other value now.
    old = _defaults(old) | old
    changed = []
    for field in sorted(old.keys() | new.keys()):
        if old.get(field) == new.get(field):
            continue
        line = f"{field}: {old.get(field)!r} -> {new.get(field)!r}"
        was_set = field in named or field in IN_CHECKPOINTS or field.startswith(OPTIONS)
        if was_set and not _may_change(field):
            way = "restore the setting"
            if field in REMOVED:
                way = (
                    "this version has no such setting: continue with the version that began the run"
                )
            raise UserError(
                f"{place} holds a run with another config ({line}); {way}, or name a new directory."
            )
        changed.append(line)
    return tuple(changed)


def _may_change(field: str) -> bool:
    """Whether a resume may change a field; one of an earlier version is as its section is."""
    known = known_settings()
    while field not in known and "." in field:
        field = field.rpartition(".")[0]
    return field in known and known[field].may_change


def _defaults(recorded: dict[str, Any]) -> dict[str, Any]:
    """The default of every setting, where some follow recorded ones."""
    config = get_config()
    known = recorded.keys() & flatten(config.to_dict()).keys()
    for field in known:
        value = recorded[field]
        with contextlib.suppress(TypeError, ValueError):  # a type of an older release
            value = tuple(value) if isinstance(value, list) else value
            config.update_from_flattened_dict({field: value})
    return flatten(jsonable(config.to_dict()))
