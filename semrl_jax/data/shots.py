"""Reads the examples of few-shot prompts."""

from __future__ import annotations

import itertools
import os

from semrl_jax.data.prompt_rows import check_text
from semrl_jax.data.row_files import Row, RowError, read_rows
from semrl_jax.support.errors import UserError

QUESTION, RESPONSE, ANSWER = "question", "response", "answer"


def read_shots(path: str | os.PathLike[str], count: int) -> list[tuple[str, str]]:
    """The first examples of a file, as pairs of question and answer; UserError if too few."""
    shots = []
    for where, row in itertools.islice(read_rows(path), count):
        try:
            shots.append(_pair(row))
        except RowError as error:
            raise UserError(f"evaluation.shots_file: {where}: {error}") from None
    if len(shots) < count:
        raise UserError(
            f"evaluation.shots_file={str(path)!r} has {len(shots)} rows, fewer than {count} shots."
        )
    return shots


def _pair(row: Row) -> tuple[str, str]:
    if isinstance(row, RowError):
        raise row
    fields = QUESTION, RESPONSE if row.get(RESPONSE) is not None else ANSWER
    for field in fields:
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise RowError(f"field {field!r} must be text, not {row.get(field)!r:.80}.")
        check_text(field, row[field])
    question, answer = (row[field].strip() for field in fields)
    return question, answer
