"""Columns of text and of token ids in Parquet files."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from semrl_jax.errors import UserError


def strings(values: Iterable[str | None]) -> pa.Array:
    """A column of text, typed also if all values are None; unpaired surrogates become "?"."""
    texts = [
        value if value is None else value.encode(errors="replace").decode() for value in values
    ]
    return pa.array(texts, pa.string())


def check_token_ids(table: pa.Table, file: pathlib.Path) -> None:
    """Checks `prompt_ids` and `response_ids` of responses, of which only the latter may be empty.

    Raises:
      UserError: if a row has something else than token ids.
    """
    for name in ("prompt_ids", "response_ids"):
        column = table[name]
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        good = is_list and not column.null_count
        ids = pc.list_flatten(column) if good else column
        if good and len(ids):
            good = pa.types.is_integer(ids.type) and not ids.null_count
            good = good and 0 <= pc.min(ids).as_py() <= pc.max(ids).as_py() < 2**31
        if good and len(column) and name == "prompt_ids":
            good = pc.min(pc.list_value_length(column)).as_py() > 0
        if not good:
            raise UserError(
                f"{file}: a row has no token ids in the column {name}; it is damaged or not of "
                "responses, so name another file."
            )
