"""The directory of the results of one policy: its lock, its record, and finished calls."""

from __future__ import annotations

import dataclasses
import fcntl
import pathlib
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float

from semrl_jax.evaluation.samples import Sample, read_samples
from semrl_jax.support import response_files
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import (
    jsonable,
    read_json_object,
    replacing,
    through_no_link,
    write_json,
)

RECORD, SAMPLES, PARTS = "evaluation.json", "samples.parquet", "parts"
MADE_BEFORE_RECORD = {".lock", "replica0"}


def _shown(value: Any) -> str:
    """A value in a message; of a digest only its beginning."""
    is_digest = isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)
    return f"digest {value[:8]}" if is_digest else f"{value!r:.80}"


class Part(NamedTuple):
    """What the responses of a call leave: their table, and functions that write further files."""

    table: pa.Table
    files: Mapping[pathlib.Path, Callable[[BinaryIO], None]] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class ResultDirectory:
    """A directory that this process has locked.

    Its record has what decides the responses. `parts/` has the responses of finished calls, and
    samples.parquet those of finished benchmarks.
    """

    path: pathlib.Path
    run_id: str  # of the weights on the replicas, the same at every start
    lock: Any  # closing it releases the directory
    record: str = RECORD  # name of the file with the record

    def check(self, shared: Mapping[str, Any], benchmarks: Mapping[str, Mapping[str, Any]]) -> None:
        """Records what decides the responses; UserError if it is another than earlier."""
        record = self._record()
        for name, new in {"": shared, **benchmarks}.items():
            old = record["benchmarks"].get(name, {}) if name else record.get("settings", {})
            for field, value in jsonable(new).items():
                if old.get(field, value) != value:
                    of = f" of {name}" if name else ""
                    raise UserError(
                        f"--output={self.path} holds responses with other {field}{of} "
                        f"({_shown(old[field])}, now {_shown(value)}); restore it or name a new "
                        "directory."
                    )
        record.setdefault("settings", {}).update(jsonable(shared))
        for name, new in benchmarks.items():
            record["benchmarks"].setdefault(name, {}).update(jsonable(new))
        self._write_record(record)

    def note(self, **facts: Any) -> None:
        """Adds facts to the record that are never compared."""
        self._write_record(self._record() | jsonable(facts))

    def has_part(self, name: str) -> bool:
        """Whether the responses of a call are there."""
        return self.part(name).exists()

    def write_part(self, name: str, part: Part) -> None:
        """Writes what a call leaves; its table comes last, and marks the part as complete."""
        (self.path / PARTS).mkdir(exist_ok=True)
        for file, write in part.files.items():
            with replacing(self.path / file) as out:
                write(out)
        response_files.write(self.part(name), part.table)

    def read_part(self, name: str) -> tuple[list[Sample], Float[np.ndarray, "B L D"] | None]:
        """The samples of a call, and the array in its other file; UserError if one is damaged."""
        states = self.part(name, ".npy")
        try:
            found = np.load(states, allow_pickle=False) if states.exists() else None
            if found is not None and (found.ndim != 3 or found.dtype != np.float32):
                raise ValueError("it has no mean hidden states")
            return read_samples(self.part(name)), found
        except (ValueError, EOFError, OSError) as error:  # a UserError is a ValueError
            file = f"{states}: " if not isinstance(error, UserError) else ""
            raise UserError(
                f"{file}{str(error).rstrip('.')}; remove {self.part(name)}, and the same command "
                "samples these responses again."
            ) from None

    def finished(self) -> dict[str, list[Sample]]:
        """The samples of finished benchmarks."""
        file = self.path / SAMPLES
        found: dict[str, list[Sample]] = {}
        for sample in read_samples(file) if file.exists() else ():
            found.setdefault(sample.benchmark, []).append(sample)
        if unknown := found.keys() - self._record()["benchmarks"].keys():
            raise UserError(
                f"{file} has {min(unknown)!r:.100}, which {self.record} does not know; remove it."
            )
        return found

    def finish(self, parts: Sequence[str], over_set: Mapping[str, Mapping[str, float]]) -> None:
        """Adds the parts to samples.parquet, records metrics over sets, and removes the parts."""
        record = self._record()
        for name, values in over_set.items():
            record["benchmarks"][name]["over_set"] = dict(values)
        self._write_record(record)
        if parts:
            file = self.path / SAMPLES
            earlier = [file] if file.exists() else []
            response_files.join([*earlier, *map(self.part, parts)], file)
        shutil.rmtree(self.path / PARTS, ignore_errors=True)

    def over_set(self, benchmark: str) -> dict[str, float]:
        """The metrics over all responses of a benchmark, as `finish` recorded them."""
        return self._record()["benchmarks"].get(benchmark, {}).get("over_set", {})

    def close(self) -> None:
        """Releases the lock."""
        self.lock.close()

    def _record(self) -> dict[str, Any]:
        return read_json_object(self.path / self.record)

    def _write_record(self, record: dict[str, Any]) -> None:
        write_json(self.path / self.record, record)

    def part(self, name: str, suffix: str = ".parquet") -> pathlib.Path:
        """A file of the part of this name."""
        return self.path / PARTS / f"{name}{suffix}"


def open_results(path: pathlib.Path, name: str = RECORD) -> ResultDirectory:
    """Makes or reopens a directory of results, locked for this process; UserError if it cannot."""
    path = path.absolute()
    try:
        if path.exists() and not path.is_dir():
            raise UserError(f"--output={path} is a file; name a directory.")
        contents = {entry.name for entry in path.iterdir()} if path.exists() else set()
        before = {*MADE_BEFORE_RECORD, name.replace(".json", ".writing")}
        if name not in contents and contents - before:
            raise UserError(f"--output={path} is not empty and lacks {name}; name a new directory.")
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / ".lock", "a", opener=through_no_link)  # noqa: SIM115 - see close()
    except OSError as error:
        raise UserError(f"--output={path} cannot be used: {error.strerror or error}.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if name not in contents:
            write_json(path / name, {"run_id": secrets.token_hex(8), "benchmarks": {}})
        record = read_json_object(path / name)
        of_benchmarks = record.get("benchmarks")
        if not (
            isinstance(record.get("run_id"), str)
            and isinstance(record.get("settings", {}), dict)
            and isinstance(of_benchmarks, dict)
            and all(isinstance(one, dict) for one in of_benchmarks.values())
            and all(isinstance(one.get("over_set", {}), dict) for one in of_benchmarks.values())
        ):
            raise UserError(f"{path / name} is no record of responses; name a new directory.")
        return ResultDirectory(path, record["run_id"], lock, name)
    except BlockingIOError:
        lock.close()
        raise UserError(
            f"--output={path} belongs to a running process; stop it or name another directory."
        ) from None
    except BaseException:
        lock.close()
        raise
