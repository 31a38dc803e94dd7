"""Columns of text in Parquet files."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa


def strings(values: Iterable[str | None]) -> pa.Array:
    """A column of text, typed also if all values are None; unpaired surrogates become "?"."""
    texts = [
        value if value is None else value.encode(errors="replace").decode() for value in values
    ]
    return pa.array(texts, pa.string())
