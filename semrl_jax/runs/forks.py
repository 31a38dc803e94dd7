"""A new run directory that continues from a checkpoint of another run."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from typing import Any, NamedTuple

from semrl_jax.runs.copies import ANSWERS, CHECKPOINTS, MANIFEST, RESTORING
from semrl_jax.support.errors import UserError
from semrl_jax.support.rows import read_rows
from semrl_jax.support.run_directory import START, record_of
from semrl_jax.support.safe_files import remove, replacing, write_json

# Models that a run has made or copied, its answers, and the hashes of its inputs.
WHOLE = (START, "warm_start", ANSWERS, "inputs.json")
WRITTEN = (*WHOLE, "rollouts", "metrics.jsonl", CHECKPOINTS, "config.json")


class Fork(NamedTuple):
    """A complete checkpoint of a run; with step 0, its beginning, of which there is none."""

    path: str  # as the user gave it
    run: pathlib.Path
    step: int
    settings: dict[str, Any]  # that the run recorded


def find_fork(path: str) -> Fork:
    """The checkpoint that `training.resume_from` names; UserError if no run can continue from it.

    Only its manifest is looked for; `write_fork` reads all of it.
    """
    folder = pathlib.Path(path).absolute()
    run, field = folder.parents[1], f"training.resume_from={path}"
    if folder.parent.name != CHECKPOINTS or not re.fullmatch(r"0|[1-9][0-9]*", folder.name):
        raise UserError(f"{field} must be a checkpoint of a run, such as RUN/{CHECKPOINTS}/20.")
    settings = record_of(run).get("config")
    if not isinstance(settings, dict) or not isinstance(settings.get("training"), dict):
        raise UserError(f"{field}: {run} has no config.json of a run; name a checkpoint of a run.")
    if not (folder / MANIFEST).is_file():
        complete = sorted(int(file.parent.name) for file in folder.parent.glob(f"*/{MANIFEST}"))
        raise UserError(
            f"{field} is not there, or was not completed; name one of the steps {complete}."
        )
    return Fork(path, run, int(folder.name), settings)


def write_fork(fork: Fork, directory: pathlib.Path, record: dict[str, Any]) -> None:
    """Writes what the run had at the checkpoint into a directory, and `record` as its config.json.

    UserError if the checkpoint cannot be trusted. After an error, nothing of it is left; a kill
    leaves RESTORING behind.
    """
    (directory / RESTORING).touch()
    _clear(directory)  # of what a kill left
    try:
        _copy(fork, directory)
        write_json(directory / "config.json", record)
    except BaseException as error:
        _clear(directory)
        remove(directory / RESTORING)
        if isinstance(error, shutil.Error):  # of several files; the first one is enough
            raise OSError("{} -> {}: {}".format(*error.args[0][0])) from None
        raise
    (directory / RESTORING).unlink()


def _clear(directory: pathlib.Path) -> None:
    for name in WRITTEN:
        remove(directory / name)


def _copy(fork: Fork, directory: pathlib.Path) -> None:
    from semrl_jax.runs.checkpoint_files import checkpoint_problem  # loads JAX

    checkpoint, copy = (run / CHECKPOINTS / str(fork.step) for run in (fork.run, directory))
    if fork.step:
        shutil.copytree(checkpoint, copy)
        if problem := checkpoint_problem(copy):
            problem = problem.replace(str(copy), str(checkpoint))
            raise UserError(
                f"training.resume_from={fork.path}: {problem}; name another checkpoint."
            )
    for name in WHOLE:
        if (fork.run / name).is_dir():
            shutil.copytree(fork.run / name, directory / name)
        elif (fork.run / name).is_file():
            shutil.copy2(fork.run / name, directory / name)
    rows = [row for row in read_rows(fork.run / "metrics.jsonl") if row["step"] < fork.step]
    with replacing(directory / "metrics.jsonl") as out:
        out.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    for file in (fork.run / "rollouts").glob("*.parquet"):
        found = re.fullmatch(r"(?:step|eval)_(\d+)\.parquet", file.name)
        if found and int(found[1]) < fork.step:
            (directory / "rollouts").mkdir(exist_ok=True)
            shutil.copy2(file, directory / "rollouts")
