"""Grades the responses in a file, row by row, and summarises the verdicts."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from semrl_jax import data
from semrl_jax.data.prompt_rows import MAX_COLUMNS_CHARS, answer_text, field_value
from semrl_jax.rewards import Verdict, VerifierPool
from semrl_jax.sampling.scoring import verdict_columns
from semrl_jax.support import response_files
from semrl_jax.support.end_markers import response_text
from semrl_jax.support.errors import UserError, prefixed
from semrl_jax.support.parquet import ParquetFile
from semrl_jax.support.safe_files import parse_json, replacing

GROUP_FIELDS = ("benchmark", "data_source")
_ROWS = 1024  # graded together
_PROGRESS_S = 10.0


class Fields(NamedTuple):
    """Names of fields; `group` None is the first of GROUP_FIELDS that a row has."""

    response: str = "response"
    reference: str = "reference"
    row: str = "row"
    group: str | None = None
    prefix: str = ""


class Tally:
    """Counts verdicts by group."""

    def __init__(self):
        # Number, sum of scores and number of correct ones by group. A file may have many millions.
        self._totals: dict[str, tuple[int, float, int]] = {}
        self._errors: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )

    def add(self, group: str, verdict: Verdict) -> None:
        """Counts one verdict."""
        count, score, correct = self._totals.get(group, (0, 0.0, 0))
        self._totals[group] = count + 1, score + verdict.score, correct + verdict.correct
        if verdict.error:
            self._errors[group][verdict.error_kind] += 1

    def __len__(self) -> int:
        return sum(count for count, *_ in self._totals.values())

    def table(self) -> Table:
        """A row per group; for several groups, one over all responses."""
        table = Table("group", "responses", "correct", "mean score", "errors")
        for group in sorted(self._totals):
            table.add_row(escape(group or "all"), *self._cells([group]))
        if len(self._totals) > 1:
            table.add_row("all", *self._cells(list(self._totals)))
        return table

    def _cells(self, groups: Sequence[str]) -> tuple[str, ...]:
        count, score, correct = map(sum, zip(*(self._totals[group] for group in groups)))
        errors = sum((self._errors[group] for group in groups), collections.Counter())
        kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(errors.items()))
        share = f"{correct} ({100 * correct / count:.2f}%)"
        return f"{count}", share, f"{score / count:.4f}", kinds or "none"


def check_file(file: pathlib.Path) -> None:
    """Raises UserError if there is no such file, or its suffix is unknown."""
    with prefixed("--samples"):
        data.check_file(file)


def check_rows(file: pathlib.Path, fields: Fields, *, takes_row: bool) -> None:
    """Reads all rows, so that a bad one is named before any is graded; UserError for it."""
    names: list[str] | None = None
    for batch in _batches(file, fields, takes_row):
        if names is None and batch.samples:
            names = list(batch.samples[0].values)
    if names is None:
        raise UserError(f"--samples: {file} has no rows.")
    if fields.group is not None and fields.group not in names:
        raise UserError(f"--group={fields.group} is no field of {file}; the first row has {names}.")


def score(file: pathlib.Path, output: pathlib.Path, pool: VerifierPool, fields: Fields) -> Tally:
    """Grades all rows, in constant memory; writes them with the verdicts, and prints a summary.

    The output is complete or missing. UserError names a row that cannot be graded, and the field.
    """
    tally = Tally()
    started_s = reported_s = time.monotonic()
    output.parent.mkdir(parents=True, exist_ok=True)
    with _writer(file, output, fields) as write:
        for batch in _batches(file, fields, pool.takes_row):
            pending = [
                pool.submit(sample.response, sample.reference, sample.prompt_row)
                for sample in batch.samples
            ]
            verdicts = [future.result() for future in pending]
            write(batch, verdicts)
            for sample, verdict in zip(batch.samples, verdicts):
                tally.add(_group(sample.values, fields), verdict)
            now = time.monotonic()
            if now - reported_s > _PROGRESS_S:
                reported_s = now
                print(f"{len(tally)} responses, {len(tally) / (now - started_s):.3g}/s", flush=True)
    Console(highlight=False, soft_wrap=True).print(tally.table())
    print(f"done: {output} has {len(tally)} graded responses")
    return tally


class _Sample(NamedTuple):
    response: str
    reference: str
    prompt_row: str  # the row of the prompt, a JSON object; "" if the verifier takes none
    values: Mapping[str, Any]  # of the row


class _Batch(NamedTuple):
    """Some rows; `table` has all their columns if they come from Parquet."""

    samples: list[_Sample]
    table: pa.RecordBatch | None


def _batches(file: pathlib.Path, fields: Fields, takes_row: bool) -> Iterator[_Batch]:
    if file.suffix == ".jsonl":
        rows = data.read_rows(file)
        while chunk := list(itertools.islice(rows, _ROWS)):
            yield _Batch([_sample(where, row, fields, takes_row) for where, row in chunk], None)
        return
    number = 0
    for table in ParquetFile(file).batches():
        samples = []
        for row in data.batch_rows(table):
            number += 1
            samples.append(_sample(f"{file}, row {number}", row, fields, takes_row))
        yield _Batch(samples, table)


def _sample(
    where: str, row: Mapping[str, Any] | data.RowError, fields: Fields, takes_row: bool
) -> _Sample:
    """A row with its texts; UserError if one is missing or no text."""
    if isinstance(row, data.RowError):
        raise UserError(f"{where}: {row}")
    try:
        response = field_value(row, fields.response)
        reference = answer_text(field_value(row, fields.reference))
        if not isinstance(response, str):
            raise data.RowError(f"field {fields.response!r} must be text, not {response!r:.80}.")
        if reference is None:
            value = field_value(row, fields.reference)
            raise data.RowError(
                f"field {fields.reference!r} must be text or a finite number, not {value!r:.80}."
            )
        prompt_row = _prompt_row(row, fields.row) if takes_row else ""
    except data.RowError as error:
        raise UserError(f"{where}: {error}") from None
    # Rollouts of a run have the text with its end marker, which no verifier gets.
    return _Sample(response_text(response), reference, prompt_row, row)


def _prompt_row(values: Mapping[str, Any], field: str) -> str:
    """The row of the prompt as a JSON object: that of a field, or without one the whole row."""
    value = values.get(field)
    if value in (None, ""):
        value = values
    if not isinstance(value, str):
        value = json.dumps(value, default=str)
    try:
        is_object = isinstance(parse_json(value.encode()), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise data.RowError(
            f"field {field!r} must be a JSON object, not {value!r:.80}; name another by --row."
        )
    if len(value) > MAX_COLUMNS_CHARS:
        raise data.RowError(
            f"the row of the prompt has more than {MAX_COLUMNS_CHARS} characters; shorten it."
        )
    return value


def _group(row: Mapping[str, Any], fields: Fields) -> str:
    names = GROUP_FIELDS if fields.group is None else (fields.group,)
    return next((str(row[name]) for name in names if name in row), "")


@contextlib.contextmanager
def _writer(
    file: pathlib.Path, output: pathlib.Path, fields: Fields
) -> Iterator[Callable[[_Batch, Sequence[Verdict]], None]]:
    """A function that writes rows with their verdicts."""
    with replacing(output) as out, contextlib.ExitStack() as stack:
        writer: pq.ParquetWriter | None = None

        def write(batch: _Batch, verdicts: Sequence[Verdict]) -> None:
            nonlocal writer
            verdict = response_files.table_of(verdict_columns(verdicts))
            verdict = verdict.rename_columns([fields.prefix + n for n in verdict.column_names])
            if batch.table is None:
                for sample, added in zip(batch.samples, verdict.to_pylist()):
                    row = {**sample.values, **added}
                    out.write(json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n")
                return
            columns = {name: batch.table[name] for name in batch.table.schema.names}
            columns |= {name: verdict[name] for name in verdict.column_names}
            table = pa.table(columns)
            if writer is None:
                writer = stack.enter_context(
                    pq.ParquetWriter(out, table.schema, compression="zstd")
                )
            writer.write_table(table)

        yield write
