"""Files of a run with one JSON object per line: the log and the starts. Loads no JAX."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import parse_json, replacing

STARTS = "starts.jsonl"


def append_start(workdir: pathlib.Path, record: Mapping[str, Any]) -> None:
    """Appends one line to `starts.jsonl`, which has an object with `step` for every start."""
    rows = [*read_rows(workdir / STARTS), record]
    with replacing(workdir / STARTS) as out:  # a line that a kill cut is left out
        out.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def read_rows(file: pathlib.Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl up to the first invalid one, maybe cut by a kill; or UserError."""
    return read_log(file)[0]


def read_log(file: pathlib.Path) -> tuple[list[dict[str, Any]], int]:
    """Rows as `read_rows`, and how many lines are left out; a last line without end is no line."""
    try:
        content = file.read_bytes() if file.is_file() else b""
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from None
    lines = content.splitlines()
    rows: list[dict[str, Any]] = []
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:
            break
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            break
        rows.append(row)
    cut = len(rows) < len(lines) and not content.endswith(b"\n")
    return rows, len(lines) - len(rows) - cut
