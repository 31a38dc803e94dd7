"""Downloads or converts prompt data into one file for config.data.files, or benchmarks.

    python -m launch.prepare_data --dataset=gsm8k --split=train --output=data/gsm8k.jsonl
    python -m launch.prepare_data --dataset=tiny,math500 --output=data/benchmarks

Downloads the split from the Hugging Face hub, or converts a local copy with --input=FILE. Every row
is read as the trainer reads it; bad rows are named and left out. GSM8K becomes rows of question,
answer and data_source. Rows of SimpleRL-Zoo and of benchmarks are not changed. The output appears
only when it is complete, and replaces an older file. One benchmark is written to NAME.jsonl or
NAME.parquet, several or a group to a directory. Exit codes: 0 done, 2 wrong setting, bad file or no
network (one line names it).
"""

from __future__ import annotations

import errno
import http.client
import itertools
import json
import os
import pathlib
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from absl import flags

from launch import cli
from semrl_jax import data
from semrl_jax.evaluation.benchmark_spec import BenchmarkReader
from semrl_jax.evaluation.catalogue import GROUPS, find, members, names
from semrl_jax.support.errors import UserError, prefixed
from semrl_jax.support.safe_files import replacing


class Source(NamedTuple):
    """A data set on the hub."""

    repository: str
    file: str  # with {split}
    row_format: str
    answer_after: str = ""


DATASETS = {
    "gsm8k": Source(
        "openai/gsm8k", "main/{split}-00000-of-00001.parquet", "question_answer", "####"
    )
}
for _template, _level in itertools.product(
    ("abel", "qwen"), ("gsm8k_level1", "level1to4", "level3to5")
):
    _name = f"simplelr_{_template}_{_level}"
    _file = f"{_name}/{{split}}.parquet"
    DATASETS[_name] = Source("hkust-nlp/SimpleRL-Zoo-Data", _file, "simplerl")
ENDINGS = (".jsonl", ".parquet")
PROGRESS_S = 2.0
TIMEOUT_S = 30.0  # without a byte from the server
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # the user need not change a flag: not a UserError

DATASET = flags.DEFINE_string(
    "dataset",
    None,
    f"one of {', '.join(DATASETS)}; or benchmarks, separated by commas: {', '.join(names())}; or "
    f"groups of them: {', '.join(GROUPS)}",
)
SPLIT = flags.DEFINE_enum("split", "train", ("train", "test"), "the part of it")
INPUT = flags.DEFINE_string("input", "", "a local .jsonl or .parquet file to convert instead")
OUTPUT = flags.DEFINE_string(
    "output", None, "the file to write, .jsonl or .parquet; a directory for several benchmarks"
)

T = TypeVar("T")


def main() -> int:
    name, output = cli.required(DATASET), pathlib.Path(cli.required(OUTPUT))
    if name not in DATASETS:
        return prepare_benchmarks(name, output)
    if output.suffix not in ENDINGS or os.path.isdir(output):
        raise UserError(f"--output={output} must be a file ending in {' or '.join(ENDINGS)}.")
    source = DATASETS[name]
    path = pathlib.Path(INPUT.value or download(name, source.file.format(split=SPLIT.value)))
    if os.path.exists(output) and os.path.exists(path) and output.samefile(path):
        raise UserError(f"--output={output} is the input; name another file.")
    reader = data.row_reader(source.row_format, answer_after=source.answer_after)
    # SimpleRL-Zoo's rows are kept whole. From other sets, only the fields needed are read.
    whole = source.row_format == "simplerl"
    rows, num_bad_rows = valid_rows(path, reader, name, () if whole else reader.fields)
    if not whole:
        # GSM8K rows keep the published worked solution, so the same settings read both files.
        rows = [row | {"data_source": name} for row in rows]
    write_rows(output, rows)
    bad = f"; {num_bad_rows} bad rows left out" if num_bad_rows else ""
    print(f"{len(rows)} rows of {path} written to {output}{bad}.")
    section = "data" if SPLIT.value == "train" else "evaluation"
    reading = f"--config.data.row_format={source.row_format}"
    if source.answer_after:
        reading += f" --config.data.answer_after='{source.answer_after}'"
    print(f"Flags: --config.data.task=files --config.{section}.files={output} {reading}")
    return 0


def prepare_benchmarks(name: str, output: pathlib.Path) -> int:
    """Writes benchmarks, whose names or groups are separated by commas. Returns the exit code."""
    known = f"{', '.join(DATASETS)}, or a benchmark"
    with prefixed(f"--dataset={name!r} must be one of {known}"):
        wanted = [one for part in name.split(",") for one in members("benchmark", part.strip())]
    wanted = list(dict.fromkeys(wanted))
    if SPLIT.present and SPLIT.value != "test":
        raise UserError(f"--split={SPLIT.value}: a benchmark has only the split test.")
    if len(wanted) == 1 and output.suffix in ENDINGS:
        if output.stem != wanted[0]:
            raise UserError(
                f"--output={output} must be {wanted[0]}.jsonl or {wanted[0]}.parquet, its own name."
            )
        outputs = [output]
    elif output.suffix in ENDINGS:
        raise UserError(f"--output={output} must be a directory for {len(wanted)} benchmarks.")
    else:
        outputs = [output / f"{one}.jsonl" for one in wanted]
    if INPUT.value and len(wanted) > 1:
        raise UserError(f"--input={INPUT.value} is one file, but --dataset names {len(wanted)}.")
    for one, file in zip(wanted, outputs, strict=True):
        if INPUT.value:
            prepare_benchmark(one, pathlib.Path(INPUT.value), file)
            continue
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory, f"{one}.jsonl")
            fetch(find(one).url(one), path)
            prepare_benchmark(one, path, file)
    directory = outputs[0].parent
    flags_of_sets = "".join(f" --config.evaluation.benchmarks={one}" for one in wanted)
    print(f"Flags:{flags_of_sets} --config.evaluation.data_dir={directory}")
    return 0


def prepare_benchmark(name: str, path: pathlib.Path, output: pathlib.Path) -> None:
    """Writes the valid rows of a file as they are; raises as `valid_rows` and `write_rows`."""
    if os.path.exists(output) and os.path.exists(path) and output.samefile(path):
        raise UserError(f"--output={output} is the input; name another file.")
    rows, num_bad_rows = valid_rows(path, BenchmarkReader(find(name)), name)
    write_rows(output, rows)
    size = find(name).size
    print(f"{name}: {len(rows)} rows written to {output}", end="")
    print(f", {num_bad_rows} bad rows left out" if num_bad_rows else "", end="")
    print(f"; published are {size}." if len(rows) != size else ".")


def fetch(url: str, path: pathlib.Path) -> None:
    """Downloads a file; UserError if it cannot be fetched."""
    print(f"fetching {url}", flush=True)
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
            path.write_bytes(reply.read())
    except (OSError, http.client.HTTPException) as e:
        if getattr(e, "errno", None) in DISK_FULL:
            raise
        reason = " ".join(str(e).split())[:150]
        raise UserError(
            f"{url} cannot be fetched ({reason}); download it elsewhere, and pass --input=FILE."
        ) from e


def download(name: str, file: str) -> str:
    """A file of the set in the hub's cache, without a network an earlier copy; or UserError."""
    import huggingface_hub
    from huggingface_hub.errors import HTTPError  # the error of the HTTP library that the hub uses

    repository = DATASETS[name].repository
    print(f"fetching {file} of {repository}", flush=True)
    try:
        # Ask once first: the download itself would retry for half a minute without a network.
        huggingface_hub.get_hf_file_metadata(
            huggingface_hub.hf_hub_url(repository, file, repo_type="dataset")
        )
        return huggingface_hub.hf_hub_download(repository, file, repo_type="dataset")
    except (HTTPError, OSError) as e:
        if getattr(e, "errno", None) in DISK_FULL:
            raise
        cached = huggingface_hub.try_to_load_from_cache(repository, file, repo_type="dataset")
        reason = " ".join(str(e).split())[:150]
        if isinstance(cached, str):
            print(f"the hub does not answer ({reason}); taking the copy fetched earlier")
            return cached
        raise UserError(
            f"{file} of {repository} cannot be fetched ({reason}); where there is a network, run "
            f"'hf download {repository} {file} --repo-type=dataset', and pass the file it names "
            "as --input=FILE."
        ) from e


def valid_rows(
    path: pathlib.Path, reader: Any, name: str, fields: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], int]:
    """The rows that a reader accepts, and the number of the others; UserError without any."""
    bad_rows = data.BadRows(skip=True, report=print)
    rows = []
    for where, row in with_progress(data.read_rows(path, fields), "read"):
        try:
            if isinstance(row, data.RowError):
                raise row
            reader.read(row, default_source=name)
        except data.RowError as error:
            bad_rows.add(where, error)
        else:
            rows.append(row)
    if bad_rows.count and not rows:
        raise UserError(f"all {bad_rows.count} rows are bad; the first: {bad_rows.first}")
    if not rows:
        raise UserError(f"{path}: the file has no rows.")
    return rows, bad_rows.count


def write_rows(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Writes a .jsonl or .parquet file, complete or not at all; UserError if it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=True) as file:
            if path.suffix == ".parquet":
                import pyarrow
                import pyarrow.parquet

                names = dict.fromkeys(name for row in rows for name in row)  # as they appear
                columns = {name: [row.get(name) for row in rows] for name in names}
                pyarrow.parquet.write_table(pyarrow.table(columns), file)
            else:
                for row in with_progress(rows, "written"):
                    file.write(json.dumps(row).encode() + b"\n")
    except UserError:
        raise
    except OSError as e:
        if e.errno in DISK_FULL:
            raise
        raise UserError(f"--output={path} cannot be written ({e.strerror}).") from e
    except (TypeError, ValueError, OverflowError, NotImplementedError) as e:  # also pyarrow's
        raise UserError(
            f"--output={path} cannot hold these rows ({e}); try the other format."
        ) from e


def with_progress(items: Iterable[T], done: str) -> Iterator[T]:
    """Yields the rows, and prints a line every two seconds."""
    reported_s = time.monotonic()
    for count, item in enumerate(items):
        if time.monotonic() - reported_s > PROGRESS_S:
            print(f"{count} rows {done}", flush=True)
            reported_s = time.monotonic()
        yield item


if __name__ == "__main__":
    cli.run(main, __doc__)
