"""Reads the rows of JSON Lines and Parquet files, each with its place in the file."""

from __future__ import annotations

import codecs
import itertools
import json
import os
import pathlib
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import parse_json

MAX_LINE_BYTES = 16 * 2**20  # a file with longer lines is not a data set


class RowError(UserError):
    """A bad row; the message gives the reason, and the caller adds the place."""


Row = dict[str, Any] | RowError


def read_rows(
    path: str | os.PathLike[str],
    fields: Sequence[str] = (),
    optional_fields: Sequence[str] = (),
    *,
    whole_rows: bool = False,
) -> Iterator[tuple[str, Row]]:
    """Reads a JSON Lines (.jsonl, UTF-8) or Parquet (.parquet) file in constant memory.

    Args:
      fields: paths into the rows, see `rows.RowReader`. A Parquet file must have their columns,
        and only these are read; () reads all. From JSON Lines every field is read.
      optional_fields: the same for fields that a file may lack.
      whole_rows: whether to read the other columns of a Parquet file too.

    Yields:
      The place of the row ("FILE, line 3"; counted from 1, blank lines included), and the row. A
      bad row is a `RowError`, so that the caller can skip it.
    """
    path = pathlib.Path(path)
    check_file(path)
    if path.suffix == ".jsonl":
        return _read_json_lines(path)
    return _read_parquet(path, fields, optional_fields, whole_rows)


def check_file(path: str | os.PathLike[str]) -> None:
    """Raises UserError if there is no such file or its suffix is unknown."""
    path = pathlib.Path(path)
    name = repr(str(path))
    name = name if len(name) < 500 else f"{name[:200]}...{name[-200:]}"
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, ValueError) as e:  # ValueError: a NUL in the name
        raise UserError(
            f"prompt file {name} does not exist; name a .jsonl or .parquet file."
        ) from e
    except OSError as e:
        raise UserError(f"prompt file {name} cannot be opened ({e.strerror}).") from e
    if stat.S_ISDIR(mode):
        raise UserError(f"prompt file {name} is a directory; name the files in it.")
    if not stat.S_ISREG(mode):
        raise UserError(f"prompt file {name} is no regular file.")
    if path.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"prompt file {name} must end in .jsonl or .parquet.")


def _read_json_lines(path: pathlib.Path) -> Iterator[tuple[str, Row]]:
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(MAX_LINE_BYTES)
                if not line:
                    return
                where = f"{path}, line {number}"
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_LINE_BYTES)
                    yield where, RowError(f"is longer than {MAX_LINE_BYTES // 2**20} MiB.")
                elif line.strip():
                    yield where, _parse_line(line)
    except OSError as e:
        raise UserError(f"prompt file {str(path)!r} cannot be read ({e.strerror}).") from e


def _parse_line(line: bytes) -> Row:
    try:
        row = parse_json(line.rstrip(b"\r\n"))
    except UnicodeDecodeError as e:
        return RowError(f"not UTF-8 text ({e.reason} at byte {e.start + 1}).")
    except json.JSONDecodeError as e:
        return RowError(f"not valid JSON ({e.msg} at column {e.pos + 1}).")
    except ValueError as e:  # a number with thousands of digits, or deep nesting
        return RowError(f"not valid JSON ({e}).")
    if not isinstance(row, dict):
        return RowError(f"must be a JSON object, not {type(row).__name__}.")
    return row


def _read_parquet(
    path: pathlib.Path, fields: Sequence[str], optional_fields: Sequence[str], whole_rows: bool
) -> Iterator[tuple[str, Row]]:
    from semrl_jax.support.parquet import ParquetFile

    file = ParquetFile(path)
    columns = _columns(path, file.names, fields, optional_fields)
    rows = itertools.chain.from_iterable(
        batch_rows(batch) for batch in file.batches(None if whole_rows else columns)
    )
    for number, row in enumerate(rows, 1):
        yield f"{path}, row {number}", row


def _columns(
    path: pathlib.Path, names: list[str], fields: Sequence[str], optional_fields: Sequence[str]
) -> list[str] | None:
    """The columns that hold the fields; None for all columns."""
    if not fields:
        return None
    columns = set()
    for field in (*fields, *optional_fields):
        column = field if field in names else field.partition(".")[0]
        if column in names:
            columns.add(column)
        elif field not in optional_fields:
            raise UserError(
                f"{path}: field {field!r} is missing; the file has the columns {names!s:.200}."
            )
    return sorted(columns)


def batch_rows(batch: Any) -> list[Row]:
    """The rows of a batch of Parquet; a row with a value that Python cannot hold is a RowError."""
    rows: list[Row] = []
    try:
        rows += batch.to_pylist()
    except (ValueError, OverflowError):  # text that is not UTF-8, a time outside Python's range
        for i in range(batch.num_rows):
            try:
                rows += batch.slice(i, 1).to_pylist()
            except UnicodeDecodeError as e:
                rows.append(RowError(f"holds text that is not UTF-8 ({e.reason})."))
            except (ValueError, OverflowError) as e:
                rows.append(RowError(f"holds a value that cannot be read ({e!s:.100})."))
    for field in batch.schema:
        if shortened := _shortest_floats(field.type):
            for row in rows:
                if not isinstance(row, RowError):
                    row[field.name] = shortened(row[field.name])
    return rows


def _shortest_floats(kind: Any) -> Callable[[Any], Any] | None:
    """What makes 0.1 of the 0.10000000149011612 that pyarrow reads from float32; None: no such."""
    import pyarrow.types as types

    if types.is_float32(kind) or types.is_float16(kind):
        dtype = np.dtype(kind.to_pandas_dtype())
        return lambda value: value if value is None else float(str(dtype.type(value)))
    if types.is_struct(kind):
        found = {field.name: _shortest_floats(field.type) for field in kind}
        found = {name: shortened for name, shortened in found.items() if shortened}
        if not found:
            return None
        return lambda value: value and value | {name: found[name](value[name]) for name in found}
    if types.is_map(kind) or not hasattr(kind, "value_type"):  # no field is a path into a map
        return None
    inner = _shortest_floats(kind.value_type)
    if inner is None or types.is_dictionary(kind):
        return inner
    return lambda values: values and [inner(value) for value in values]
