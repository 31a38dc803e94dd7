"""Reads untrusted files with limits; writes files completely and never through links."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO

from semrl_jax.support.errors import UserError

MAX_JSON_BYTES = 16 * 2**20
MAX_JSON_DEPTH = 100  # so that recursive code over the value cannot exhaust the stack


def read_json_object(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the JSON object in an untrusted file; UserError names file and reason.

    FileNotFoundError if there is none. If a key occurs twice, the last one counts.
    """
    try:
        # O_NONBLOCK: opening a pipe must not wait for a writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UserError(f"{file} is no regular file.")
            with open(descriptor, "rb", closefd=False) as source:
                content = source.read(MAX_JSON_BYTES + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from None
    if len(content) > MAX_JSON_BYTES:
        raise UserError(f"{file} is larger than {MAX_JSON_BYTES // 2**20} MiB, too large to read.")
    try:
        value = parse_json(content)
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} must hold a JSON object, not {type(value).__name__}.")
    return value


def parse_json(content: bytes) -> Any:
    """Parses an untrusted JSON text; raises ValueError, or a subclass, with a short reason."""
    too_deep = f"nested more than {MAX_JSON_DEPTH} deep"
    try:
        value = json.loads(content.decode())
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return value
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = list(itertools.chain.from_iterable(inner))
    raise ValueError(too_deep)


def check_regular(file: str | os.PathLike[str]) -> None:
    """UserError if the file is not a regular one: opening a pipe would wait for a writer."""
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise UserError(f"{file} is no regular file.")


def check_plain(field: str, directory: pathlib.Path) -> None:
    """UserError for a directory in which no checkpoint can be: Orbax takes its path as a pattern.

    Orbax would find none of the arrays that it has written there, or those of another directory.
    """
    if found := re.search(r"[*?\[\\]", str(directory)):
        raise UserError(
            f"{field}: checkpoints cannot be read again in {directory}, because of the character "
            f"{found[0]} in its path; name a directory without * ? [ and \\."
        )


@contextlib.contextmanager
def replacing(file: pathlib.Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Opens `file` with the suffix ".writing", and renames it to `file` if the block succeeds.

    An existing file or link at either name is replaced, never written through; UserError for a
    directory. With `durable`, the content is on the disk before the rename.
    """
    staging = file.with_suffix(".writing")
    for path in (staging, file):
        if path.is_dir() and not path.is_symlink():
            raise UserError(f"{path} is a directory, but a file must be written there; remove it.")
    staging.unlink(missing_ok=True)
    try:
        with open(staging, "xb") as out:  # "x" follows no link
            yield out
            if durable:
                out.flush()
                os.fsync(out.fileno())
        staging.rename(file)
    except BaseException:
        with contextlib.suppress(OSError):
            staging.unlink()
        raise


@contextlib.contextmanager
def replacing_directory(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes the directory `<path>.writing`, and renames it to `path` if the block succeeds."""
    staging, old = (path.with_name(path.name + end) for end in (".writing", ".replaced"))
    for leftover in (staging, old):
        remove(leftover)
    staging.mkdir(parents=True)
    yield staging
    if os.path.lexists(path):
        path.rename(old)
    staging.rename(path)
    with contextlib.suppress(OSError):  # the next call removes it
        remove(old)


def write_json(file: pathlib.Path, content: Any, *, durable: bool = False) -> None:
    """Writes a JSON file as `replacing` does."""
    with replacing(file, durable=durable) as out:
        out.write(json.dumps(content, indent=2).encode() + b"\n")


def through_no_link(path: str, flags: int) -> int:
    """An `opener` of `open` for appending to a file; UserError for a link or a pipe."""
    if os.path.islink(path):
        raise UserError(f"{path} is a symbolic link, so nothing is written there; remove it.")
    if os.path.lexists(path) and stat.S_ISFIFO(os.lstat(path).st_mode):
        raise UserError(f"{path} is a pipe, so nothing is written there; remove it.")
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def remove(path: pathlib.Path) -> None:
    """Removes a file, a link or a directory with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def jsonable(tree: Any) -> Any:
    """The tree as JSON gives it back: tuples become lists."""
    return json.loads(json.dumps(tree))
