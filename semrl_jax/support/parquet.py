"""Reads untrusted Parquet files within limits of memory; checks and makes their columns."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import check_regular

MAX_CELL_BYTES = 4 * 2**20  # of a text, alone or in a list
MAX_ROW_BYTES = 64 * 2**20  # of all texts in the lists of a column, or of bytes that are no text
MAX_TABLE_BYTES = 2 * 2**30  # of a file that is read as a whole
MAX_EXPANSION = 1000  # decoded bytes per byte of a large file
MAX_WIDTH = 2**16  # bytes of a value of fixed width
_LARGE_BYTES = 64 * 2**20
_BATCH_ROWS = 1024


class ParquetFile:
    """An untrusted file, whose texts are checked before they are multiplied in memory.

    A dictionary holds a text once for all rows, so a few bytes in a file can become gigabytes. All
    texts are therefore read as dictionaries, which are not larger than the footer says. They become
    plain texts only after their lengths have been checked, and few rows at a time if they are long.
    UserError names a file that cannot be read, or would expand as no file of data does.
    """

    def __init__(self, file: str | os.PathLike[str]):
        self._file = pathlib.Path(file)
        with self._named():
            check_regular(file)
            self._metadata = pq.read_metadata(file)
            self.schema: pa.Schema = self._metadata.schema.to_arrow_schema()
            self.names: list[str] = list(self.schema.names)  # decodes them
            # Not of single columns: damage in their statistics ends the process in C++.
            groups = map(self._metadata.row_group, range(self._metadata.num_row_groups))
            size, stored = sum(group.total_byte_size for group in groups), os.stat(file).st_size
        if size > max(_LARGE_BYTES, MAX_EXPANSION * stored):
            raise UserError(
                f"{self._file} has {stored} bytes and would take {size} in memory; name another."
            )

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """All rows of some columns (None: all), a few at a time; UserError if damaged or long."""
        with self._named():
            source = pq.ParquetFile(
                self._file,
                metadata=self._metadata,
                read_dictionary=self._texts(),
                page_checksum_verification=True,  # of pages that have one
            )
        first = 1
        with source:
            found = source.iter_batches(_BATCH_ROWS, columns=columns and list(columns))
            while True:
                with self._named():
                    batch = next(found, None)
                if batch is None:
                    return
                for part in self._parts(batch, first):
                    first += len(part)
                    yield part

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The rows and errors of `batches` as tables, with texts that are UTF-8."""
        for batch in self.batches(columns):
            with self._named():
                table = pa.Table.from_batches([batch])
                table.validate(full=True)
            yield table

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows of some columns as one table, see `tables`; of at most MAX_TABLE_BYTES."""
        num_bytes, found = 0, []
        names = self.names if columns is None else columns
        for table in self.tables(columns):
            num_bytes += table.nbytes
            if num_bytes > MAX_TABLE_BYTES:
                raise UserError(
                    f"{self._file} has more than {MAX_TABLE_BYTES // 2**30} GiB to read; split it."
                )
            found.append(table)
        with self._named():
            schema = pa.schema([self.schema.field(name) for name in names])
            return pa.concat_tables(found) if found else schema.empty_table()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # a damaged file breaks the reader in any way
            if isinstance(error, OSError) and error.errno:
                raise UserError(f"{self._file} cannot be read: {error.strerror}.") from None
            reason = " ".join(str(error).split()).rstrip(".")
            raise UserError(f"{self._file} cannot be read as Parquet: {reason:.200}.") from None

    def _texts(self) -> list[str]:
        """The paths of the columns with texts, also in lists and structs."""
        leaves = [self._metadata.schema.column(i) for i in range(self._metadata.num_columns)]
        for leaf in leaves:
            if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY" and leaf.length > MAX_WIDTH:
                raise UserError(
                    f"{self._file}: values of {leaf.path!r:.99} have over {MAX_WIDTH} bytes."
                )
        return [
            leaf.path
            for leaf in leaves
            if leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type != "DECIMAL"
        ]

    def _parts(self, batch: pa.RecordBatch, first: int) -> Iterator[pa.RecordBatch]:
        """The rows with plain texts, in parts that fit into memory."""
        total = 0
        for name, column in zip(batch.schema.names, batch.columns):
            where = f"{self._file}: column {name!r:.100}, rows {first} to {first + len(batch) - 1}:"
            with self._named():
                lengths = list(_text_lengths(column))
                longest = max((pc.max(part).as_py() or 0 for part in lengths), default=0)
                size = sum(pc.sum(part).as_py() or 0 for part in lengths)
            kind = self.schema.types[self.schema.get_all_field_indices(name)[0]]
            most = MAX_ROW_BYTES if kind == pa.binary() else MAX_CELL_BYTES
            if longest > most:
                raise UserError(f"{where} a cell has {longest} bytes, more than {most}; remove it.")
            if len(batch) == 1 and size > MAX_ROW_BYTES:
                raise UserError(
                    f"{where} the lists have over {MAX_ROW_BYTES} bytes of text; remove the row."
                )
            total += size
        if len(batch) > 1 and total > _LARGE_BYTES:
            half = len(batch) // 2
            yield from self._parts(batch.slice(0, half), first)
            yield from self._parts(batch.slice(half), first + half)
            return
        with self._named():
            indices = map(self.schema.get_all_field_indices, batch.schema.names)
            kinds = [self.schema.field(places[0]).type for places in indices]
            columns = [
                column if column.type == kind else column.cast(kind)
                for column, kind in zip(batch.columns, kinds)
            ]
            plain = pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
        yield plain


def _text_lengths(array: pa.Array) -> Iterator[pa.Array]:
    """The number of bytes of each text in an array, also of those in lists and structs."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        yield from _text_lengths(array.storage)
    elif pa.types.is_dictionary(kind):
        for lengths in _text_lengths(array.dictionary):
            yield lengths.take(array.indices)
    elif pa.types.is_struct(kind):
        for child in array.flatten():
            yield from _text_lengths(child)
    elif pa.types.is_nested(kind):  # lists and maps
        yield from _text_lengths(array.flatten())
    elif pa.types.is_fixed_size_binary(kind):
        yield pa.array([kind.byte_width] * bool(len(array)))
    elif kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        yield pc.binary_length(array)


def with_types(table: pa.Table, types: Mapping[str, pa.DataType], file: pathlib.Path) -> pa.Table:
    """The table with these types: 7 and bytes of UTF-8 become texts; UserError if one does not."""
    for name in types.keys() & set(table.column_names):
        try:
            column = pc.cast(table[name], types[name])
        except pa.ArrowException:
            raise UserError(
                f"{file}: the column {name!r} is of {table[name].type!s:.100}, but must be of "
                f"{types[name]}; it is damaged or not of responses, so name another file."
            ) from None
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def strings(values: Iterable[str | None]) -> pa.Array:
    """A column of text, typed also if all values are None; unpaired surrogates become "?"."""
    texts = [
        value if value is None else value.encode(errors="replace").decode() for value in values
    ]
    return pa.array(texts, pa.string())
