"""Reads the examples of few-shot prompts."""

from __future__ import annotations

import itertools
import os

from semrl_jax.data.files import RowError, read_rows
from semrl_jax.data.rows import check_text
from semrl_jax.support.errors import UserError

QUESTION, RESPONSE, ANSWER = "question", "response", "answer"


def read_shots(path: str | os.PathLike[str], count: int) -> list[tuple[str, str]]:
    """The first examples of a .jsonl or .parquet file, as pairs of question and answer.

    The answer of a row is its field "response", or else "answer".

    Raises:
      UserError: if the file cannot be read, has fewer rows, or one of them is bad. The message
        names file, row and field.
    """
    shots = []
    for where, row in itertools.islice(read_rows(path), count):
        if isinstance(row, RowError):
            raise UserError(f"evaluation.shots_file: {where}: {row}")
        pair = []
        for field in (QUESTION, RESPONSE if row.get(RESPONSE) is not None else ANSWER):
            value = row.get(field)
            if not isinstance(value, str) or not value.strip():
                raise UserError(
                    f"evaluation.shots_file: {where}: field {field!r} must be text, not "
                    f"{value!r:.80}."
                )
            try:
                check_text(field, value)
            except RowError as error:
                raise UserError(f"evaluation.shots_file: {where}: {error}") from None
            pair.append(value.strip())
        shots.append((pair[0], pair[1]))
    if len(shots) < count:
        raise UserError(
            f"evaluation.shots_file={str(path)!r} has {len(shots)} rows, but {count} examples are "
            "asked for; lower evaluation.shots or the setting shots."
        )
    return shots
