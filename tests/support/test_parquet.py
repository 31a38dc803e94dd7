"""Parquet files whose cells would fill the memory, and columns of another type."""

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semrl_jax.support import response_files
from semrl_jax.support.errors import UserError
from semrl_jax.support.parquet import MAX_CELL_BYTES, ParquetFile, with_types
from tests.cases import refused

MIB = 2**20
CELL = "a" * (8 * MIB)
# A case: the column and the message.
BOMBS = {
    "in a dictionary": (lambda: repeated(CELL, 300), "rows 1 to 300: a cell has 8388608 bytes"),
    "in lists": (lambda: in_lists(CELL, [1] * 300), "a cell has 8388608 bytes, more than 4194304"),
    "in one list": (lambda: in_lists(CELL[: 3 * MIB], [300]), "the lists have over 67108864 bytes"),
    "all different": (lambda: [f"{CELL}{i}" for i in range(10)], "would take"),
    "in one of many rows": (lambda: ["a"] * 2000 + [CELL], "1025 to 2001: a cell has 8388608"),
}
MEASURED = """
import resource, sys
from semrl_jax import data
from semrl_jax.support.errors import UserError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for _ in data.read_rows(sys.argv[1], ["text"]):
        pass
except UserError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def repeated(text, count):
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([text]))


def in_lists(text, lengths):
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, repeated(text, sum(lengths)))


def write_bomb(file, case):
    column, message = BOMBS[case]
    pq.write_table(pa.table({"text": column()}), file, compression="zstd")
    return message


@pytest.mark.parametrize("case", BOMBS)
def test_a_small_file_with_gigabytes_is_refused(tmp_path, case):
    file = tmp_path / "bomb.parquet"
    message = write_bomb(file, case)
    assert file.stat().st_size < 50_000
    allocated = pa.total_allocated_bytes()
    with pytest.raises(UserError) as caught:
        for _ in ParquetFile(file).batches():
            pass
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert pa.total_allocated_bytes() - allocated < 64 * MIB


def test_its_memory_is_small(tmp_path):
    file = tmp_path / "bomb.parquet"
    write_bomb(file, "in a dictionary")
    command = [sys.executable, "-c", MEASURED, str(file)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    message, kibibytes = out.splitlines()
    assert "a cell has 8388608 bytes" in message and int(kibibytes) < 300 * 1024


def test_long_texts_arrive_in_small_parts(tmp_path):
    """Every cell is allowed, but all of them together are not held at once."""
    text = "é" * (MAX_CELL_BYTES // 2)
    table = pa.table({"text": [text] * 40, "number": list(range(40))})
    pq.write_table(table, tmp_path / "x.parquet", dictionary_pagesize_limit=2**30)
    parts = list(ParquetFile(tmp_path / "x.parquet").batches(["number", "text"]))
    assert max(part.nbytes for part in parts) <= 70 * MIB and len(parts) > 1
    assert pa.Table.from_batches(parts).select(["text", "number"]) == table


def test_bytes_may_be_as_long_as_a_row_of_texts(tmp_path):
    """The experts of 16384 tokens of Qwen3-30B-A3B, in a record for `launch.replay`."""
    experts = np.random.default_rng(0).bytes(16384 * 48 * 8)
    table = response_files.table_of({"group_id": [0, 1], "routed_experts": [experts, b""]})
    response_files.write(tmp_path / "x.parquet", table)
    assert response_files.read(tmp_path / "x.parquet") == table
    pq.write_table(pa.table({"x": [experts * 11]}), tmp_path / "y.parquet")
    message = "a cell has 69206016 bytes, more than 67108864"
    refused(message, list, ParquetFile(tmp_path / "y.parquet").batches())


def test_nested_columns_are_read_as_they_are(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"{i}"}] * (i % 3), "ids": [1, 2], "raw": b"\xff"}
        for i in range(3000)
    ]
    table = pa.Table.from_pylist(rows)
    table = table.append_column("kind", pa.array(["a"] * 3000).dictionary_encode())
    pq.write_table(table, tmp_path / "x.parquet")
    found = ParquetFile(tmp_path / "x.parquet").table()
    assert found.schema == table.schema and found.to_pylist() == table.to_pylist()
    empty = table.slice(0, 0)
    pq.write_table(empty, tmp_path / "x.parquet")
    assert ParquetFile(tmp_path / "x.parquet").table(["ids"]) == empty.select(["ids"])


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "x.parquet")
    refused(r"x\.parquet is no regular file", ParquetFile, tmp_path / "x.parquet")


def test_texts_of_another_type_are_shown_or_named(tmp_path):
    table = pa.table({"a": [7], "b": [b"\xc3\xa9"], "c": [b"\xff"], "d": [["x"]], "e": [None]})
    text = pa.string()
    found = with_types(table, dict.fromkeys("abe", text), tmp_path)
    assert [found[name].to_pylist() for name in "abe"] == [["7"], ["é"], [None]]
    for name in "cd":
        with pytest.raises(UserError, match=f"the column '{name}' is of .*, but must be of string"):
            with_types(table, {name: text}, tmp_path)
