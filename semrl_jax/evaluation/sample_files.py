"""Files of samples, `samples.parquet`: one row per response, one column per field of `Sample`.

The metrics are columns `metrics/<label>`. A cell of a metric is null if the sample does not have
it, and NaN if it was not valid.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from semrl_jax.evaluation.samples import Sample
from semrl_jax.support.errors import UserError
from semrl_jax.support.files import replacing
from semrl_jax.support.parquet import ParquetFile, strings

METRICS = "metrics/"
TYPES = {
    "benchmark": pa.string(),
    "problem": pa.int64(),
    "sample": pa.int64(),
    "question": pa.string(),
    "reference": pa.string(),
    "problem_type": pa.string(),
    "row": pa.string(),
    "response": pa.string(),
    "extracted": pa.string(),
    "correct": pa.bool_(),
    "score": pa.float64(),
    "boxed": pa.bool_(),
    "verifier_error": pa.string(),
    "finish_reason": pa.string(),
    "num_tokens": pa.int64(),
    "mean_logprob": pa.float64(),
}
MAY_BE_NULL = ("extracted",)


def write_samples(file: pathlib.Path, samples: Sequence[Sample]) -> None:
    """Writes the samples; the file is complete or missing. Unpaired surrogates become "?".

    Raises:
      UserError: if a directory lies at the name of the file.
    """
    columns = {}
    for name, kind in TYPES.items():
        values = [getattr(sample, name) for sample in samples]
        columns[name] = strings(values) if kind == pa.string() else pa.array(values, kind)
    for label in sorted({label for sample in samples for label in sample.metrics}):
        values = [sample.metrics.get(label) for sample in samples]
        # from_pandas=False: NaN is a value, not null.
        columns[METRICS + label] = pa.array(values, pa.float64(), from_pandas=False)
    with replacing(file) as out:
        pq.write_table(pa.table(columns), out, compression="zstd")


def read_samples(file: pathlib.Path) -> list[Sample]:
    """The samples of a file, in its order. Other columns are ignored.

    Raises:
      UserError: naming the file and what is wrong, if it is missing or no file of samples.
    """
    if not file.is_file():
        raise UserError(f"{file} is not a file; name a samples.parquet of an evaluation.")
    source = ParquetFile(file)
    names = _checked(file, source.schema)
    samples: list[Sample] = []
    for batch in source.batches(names):
        samples += _samples(file, len(samples), batch)
    return samples


def _checked(file: pathlib.Path, schema: pa.Schema) -> list[str]:
    """The names of the columns to read."""
    metrics = [name for name in schema.names if name.startswith(METRICS)]
    for name in (*TYPES, *metrics):
        expected = TYPES.get(name, pa.float64())
        if schema.names.count(name) != 1:
            how = "no column" if name not in schema.names else "more than one column"
            raise UserError(f"{file} is no file of samples: it has {how} {name!r:.100}.")
        if (found := schema.field(name).type) != expected:
            raise UserError(
                f"{file} is no file of samples: column {name!r:.100} must be {expected}, not "
                f"{found!s:.100}."
            )
    return [*TYPES, *metrics]


def _samples(file: pathlib.Path, first: int, batch: pa.RecordBatch) -> list[Sample]:
    for name in TYPES:
        if name not in MAY_BE_NULL and batch.column(name).null_count:
            row = first + batch.column(name).is_null().to_pylist().index(True)
            raise UserError(f"{file} is no file of samples: row {row} has no {name!r}.")
    try:
        values = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    except UnicodeDecodeError:
        raise UserError(
            f"{file} is no file of samples: rows {first} to {first + len(batch) - 1} have text "
            "that is not UTF-8."
        ) from None
    labels = [name for name in values if name.startswith(METRICS)]
    fields = zip(*(values[name] for name in TYPES))
    metrics = zip(*(values[name] for name in labels)) if labels else ((),) * len(batch)
    return [
        Sample(
            *field,
            metrics={
                label.removeprefix(METRICS): value
                for label, value in zip(labels, row)
                if value is not None
            },
        )
        for field, row in zip(fields, metrics)
    ]
