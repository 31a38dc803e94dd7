"""Files of responses: the one table, its columns, its writer and its reader.

Training runs, evaluations and generations write the columns that they have, one row per response.
A reader gets them under these names from files of earlier releases too.
"""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from semrl_jax.support.errors import UserError
from semrl_jax.support.parquet import ParquetFile, strings, with_types
from semrl_jax.support.safe_files import replacing

# Beginnings of the names of further numbers, and of lists of numbers.
METRICS, SCORES, SERIES = "metrics/", "score/", "series/"


class Column(NamedTuple):
    """A column; `meaning` is its line in docs/run_directory.md."""

    kind: pa.DataType
    meaning: str


def _per_token(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind))


TEXT, WHOLE, NUMBER, FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()
COLUMNS = {
    "step": Column(WHOLE, "step of the weights that sampled the response; only in a run"),
    "benchmark": Column(TEXT, "data source of the prompt; not in training steps"),
    "group_id": Column(
        WHOLE,
        "number of the prompt from 0, in the run, in the benchmark of `launch.evaluate`, or in the "
        "files of `launch.generate`",
    ),
    "sample_index": Column(WHOLE, "number of the response to its prompt, from 0"),
    "question": Column(TEXT, "what the user asks, without the template; not in a run"),
    "prompt": Column(
        TEXT, "with template, in a run also with special tokens; not in `launch.evaluate`"
    ),
    "reference": Column(TEXT, "reference answer; null without one"),
    "problem_type": Column(TEXT, 'such as "Algebra", or ""; only in `launch.evaluate`'),
    "row": Column(
        TEXT,
        "JSON object: the row of the prompt, or its part for a verifier of `launch.evaluate`, or "
        '""; not in a run',
    ),
    "response": Column(
        TEXT,
        "what the verifier got: without special tokens, up to the first stop string; in a run the "
        "text of all token ids",
    ),
    "extracted": Column(TEXT, "the answer that the verifier found; null if there is none"),
    "correct": Column(FLAG, "the verifier's verdict"),
    "score": Column(NUMBER, "reward from the verifier, before shaping"),
    "score/<name>": Column(
        NUMBER,
        "score of one of several verifiers or verdicts, null where another verifier has judged; "
        "`score` is their weighted sum",
    ),
    "boxed": Column(FLAG, "whether the response has a complete box"),
    "verifier_error": Column(
        TEXT, 'why the verifier [failed](verifiers.md#what-counts-as-a-failure); "" if it did not'
    ),
    "finish_reason": Column(
        TEXT,
        "`eos`; `stop`: a stop token, word or [string](data.md#where-a-response-ends); `length`; "
        "`aborted`; `given` [by the data](data.md#given-responses); `prompt_too_long`: not sampled",
    ),
    "num_tokens": Column(WHOLE, "tokens that the policy sampled"),
    "mean_logprob": Column(NUMBER, "mean of their `rollout_logprobs`; NaN without one"),
    "prompt_ids": Column(_per_token(pa.int32()), "token ids"),
    "response_ids": Column(_per_token(pa.int32()), "the same, with the end token"),
    "rollout_logprobs": Column(
        _per_token(pa.float32()),
        "log-probability of each response token under the distribution sampled from, nats; in a "
        "run, or with `--logprobs`",
    ),
    "rollout_raw_logprobs": Column(
        _per_token(pa.float32()), "of the unmodified logits; with `--logprobs`, not with vLLM"
    ),
    "response_mask": Column(
        _per_token(FLAG),
        "false on context that the policy did not sample, where the log-probability is 0; only if "
        "there is context",
    ),
    "conversations": Column(
        _per_token(pa.int32()),
        "conversation of each response token; only if an episode has several",
    ),
    "parent": Column(
        WHOLE,
        "`sample_index` of the response whose first tokens this one begins with, -1: none; only "
        "with [branches](data.md#branches)",
    ),
    "num_prefix": Column(WHOLE, "number of first tokens that are from `parent`"),
    "hint": Column(
        NUMBER,
        "share of a solution that its prompt contains, 0 without a hint; only with "
        "[hints](data.md#hints)",
    ),
    "turn_rewards": Column(
        _per_token(pa.float32()),
        "reward of each turn of the policy; only with an [environment](environments.md)",
    ),
    "turn_characters": Column(
        _per_token(pa.int32()),
        "characters of `response` by the policy, by others, by the policy, and so on; only with an "
        "environment; empty if unknown",
    ),
    "step_ends": Column(
        _per_token(pa.int32()),
        "index in `response_ids` of the last token of each [step](verifiers.md#rewards-of-steps)",
    ),
    "step_rewards": Column(_per_token(pa.float32()), "reward of each step"),
    **{
        f"turn_effective_rank{order}": Column(
            _per_token(pa.float32()), f"{name} of each turn, if measured; NaN where not valid"
        )
        for order, name in (("", "ER"), ("_velocity", "ERV"), ("_acceleration", "ERA"))
    },
    "effective_ranks": Column(
        _per_token(pa.float32()),
        "ER of each prefix that ERV and ERA are computed from; only in a run, if measured",
    ),
    # From here on to mean_states: only in records.
    "routed_experts": Column(
        pa.binary(),
        "with `rollout.router_replay`: experts of each token but the last in each layer that has "
        "experts, one byte or two each",
    ),
    "reward": Column(NUMBER, "what the update was given for the response"),
    "weight_spans": Column(
        _per_token(pa.int32()),
        "three numbers for each part with weights of its own: step of the weights, first token, "
        "token after the last",
    ),
    **{
        name: Column(_per_token(kind), meaning)
        for name, kind, meaning in (
            ("old_logprobs", pa.float32(), "log-probability under the policy before the update"),
            ("ref_logprobs", pa.float32(), "log-probability under the reference, if computed"),
            ("values", pa.float32(), "value before each token, with a critic"),
            ("advantages", pa.float32(), "advantage, shaped"),
            ("returns", pa.float32(), "what the critic learns"),
            ("trained", FLAG, "whether the update trains on the token"),
            (
                "mean_states",
                pa.float32(),
                "mean states of the measured layers, one after the other, if measured",
            ),
        )
    },
    "metrics/<label>": Column(
        NUMBER,
        "a [metric](metrics.md), such as `metrics/effective_rank_velocity`; NaN where not valid, "
        "null if not measured",
    ),
    "series/<metric>": Column(
        _per_token(pa.float32()),
        "the metric of each prefix, in the final layer; with `evaluation.metric_series`",
    ),
}
KEYS = ("group_id", "sample_index")  # of a response among those of a benchmark
IDS = ("prompt_ids", "response_ids")
# Columns of a verdict; score/<name> is another.
VERDICT = ("extracted", "correct", "score", "boxed", "verifier_error")
# Names in files of earlier releases: of evaluations, generations, and both.
OLD_NAMES = {
    "problem": "group_id",
    "sample": "sample_index",
    "prompt_index": "group_id",
    "data_source": "benchmark",
}
_OLD_VALID = "_valid"  # metrics/<label>_valid in runs: 0.0 where metrics/<label> is not valid
_MAY_BE_NULL = ("extracted",)
_WITH_TOKENS = (
    "rollouts/ of a run and what launch.evaluate and launch.generate write now have token ids"
)


def lengths_of_runs(mask: Sequence[bool] | np.ndarray) -> list[int]:
    """The lengths of the runs of equal values of a mask; the first run is of True, maybe of 0."""
    changes = np.flatnonzero(np.diff(np.concatenate([[True], np.asarray(mask, bool)]))).tolist()
    return np.diff([0, *changes, len(mask)]).tolist()


def kind_of(name: str) -> pa.DataType | None:
    """The type of a column; None for one that is not of responses."""
    if name in COLUMNS:
        return COLUMNS[name].kind
    if name.startswith(SERIES):
        return COLUMNS["series/<metric>"].kind
    return NUMBER if name.startswith((METRICS, SCORES)) else None


def table_of(columns: Mapping[str, Sequence[Any]]) -> pa.Table:
    """The table of columns by name, in the order of COLUMNS. Unpaired surrogates become "?"."""
    arrays = {}
    for name in sorted(columns, key=_place):
        kind, values = kind_of(name), columns[name]
        # from_pandas=False: NaN is a value, not null.
        is_text = kind == TEXT
        arrays[name] = strings(values) if is_text else pa.array(values, kind, from_pandas=False)
    return pa.table(arrays)


def _place(name: str) -> tuple[int, str]:
    families = {METRICS: "metrics/<label>", SCORES: "score/<name>", SERIES: "series/<metric>"}
    family = name[: name.find("/") + 1]
    return list(COLUMNS).index(families.get(family, name)), name


def write(file: pathlib.Path, table: pa.Table) -> None:
    """Writes a table; the file is complete or missing. Raises as `replacing`."""
    with replacing(file) as out:
        # A dictionary makes columns of log-probabilities larger, and saves little in the others.
        pq.write_table(
            table, out, compression="zstd", use_dictionary=False, write_page_checksum=True
        )


def join(parts: Sequence[pathlib.Path], file: pathlib.Path) -> None:
    """Joins files into one, a few rows at a time; a column that one lacks is null there."""
    schema = pa.unify_schemas([_schema(part) for part in parts])
    with replacing(file) as out, pq.ParquetWriter(out, schema, compression="zstd") as writer:
        for table in itertools.chain.from_iterable(map(batches, parts)):
            tables = [schema.empty_table(), table]
            writer.write_table(pa.concat_tables(tables, promote_options="default"))


def _schema(file: pathlib.Path) -> pa.Schema:
    """The columns and types of `batches`."""
    source = ParquetFile(file)
    return _checked(source.schema.empty_table(), _stored(file, source, (), None), (), file).schema


def read(
    file: pathlib.Path, needed: Sequence[str] = (), optional: Sequence[str] | None = None
) -> pa.Table:
    """The rows of a file as one table, see `batches`."""
    source = ParquetFile(file)
    stored = _stored(file, source, needed, optional)
    return _checked(source.table(list(stored.values())), stored, needed, file)


def batches(
    file: pathlib.Path, needed: Sequence[str] = (), optional: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """The rows of a file, a few at a time, in the columns and types of COLUMNS; or UserError.

    `needed` columns have a value in every row; `extracted` may be null. `optional` ones are read if
    the file has them, METRICS stands for all metrics; None: all.
    """
    source = ParquetFile(file)
    stored = _stored(file, source, needed, optional)
    first = 0
    for table in source.tables(list(stored.values())):
        yield _checked(table, stored, needed, file, first)
        first += len(table)


def _stored(
    file: pathlib.Path, source: ParquetFile, needed: Sequence[str], optional: Sequence[str] | None
) -> dict[str, str]:
    """The columns to read and their names in the file. A present name goes before an old one."""
    present = {name: OLD_NAMES.get(name, name) for name in source.names}
    found = {new: old for old, new in present.items() if new == old or new not in present}
    for name in needed:
        if name not in found:
            where = f" ({_WITH_TOKENS})" if name.endswith("_ids") else ""
            raise UserError(f"{file} is no file of responses: it has no column {name!r}{where}.")
    if optional is not None:
        found = {
            name: stored
            for name, stored in found.items()
            if name in needed
            or name in optional
            or (name.startswith(METRICS) and METRICS in optional)
        }
    for stored in found.values():
        if source.names.count(stored) > 1:
            raise UserError(
                f"{file} is no file of responses: it has more than one column {stored!r:.100}."
            )
    return found


def _checked(
    table: pa.Table,
    stored: Mapping[str, str],
    needed: Sequence[str],
    file: pathlib.Path,
    first: int = 0,
) -> pa.Table:
    """The rows from number `first` on, with the names and types of COLUMNS."""
    table = table.select(list(stored.values())).rename_columns(list(stored))
    _check_token_ids(table, needed, file)
    kinds = {name: kind for name in stored if (kind := kind_of(name)) is not None}
    table = with_types(table, kinds, file)
    for name in needed:
        if table[name].null_count and name not in _MAY_BE_NULL:
            row = first + table[name].is_null().to_pylist().index(True)
            raise UserError(f"{file} is no file of responses: row {row} has no {name!r}.")
    for flag in [name for name in stored if name.startswith(METRICS) and name.endswith(_OLD_VALID)]:
        name = flag.removesuffix(_OLD_VALID)
        if name in stored:
            values = pc.if_else(pc.equal(table[flag], 0), math.nan, table[name])
            table = table.set_column(table.column_names.index(name), name, values)
            table = table.drop_columns(flag)
    return table


def _check_token_ids(table: pa.Table, needed: Sequence[str], file: pathlib.Path) -> None:
    """Raises UserError if a row has no token ids that are needed, or wrong ones.

    Only those of a response may be empty.
    """
    for name in IDS:
        if name not in table.column_names:
            continue
        column = table[name]
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        good = is_list and not (name in needed and column.null_count)
        column = column.drop_null()
        ids = pc.list_flatten(column) if good else column
        if good and len(ids):
            good = pa.types.is_integer(ids.type) and not ids.null_count
            good = good and 0 <= pc.min(ids).as_py() <= pc.max(ids).as_py() < 2**31
        if good and len(column) and name == "prompt_ids":
            good = pc.min(pc.list_value_length(column)).as_py() > 0
        if not good:
            raise UserError(
                f"{file}: the column {name} has a row without token ids; name another file."
            )
