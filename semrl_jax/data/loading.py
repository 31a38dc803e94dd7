"""From problem files to a prompt dataset: reads rows, applies the template and tokenises."""

from __future__ import annotations

import itertools
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from semrl_jax.data.encoding import encode, special_prefix
from semrl_jax.data.files import RowError, read_rows
from semrl_jax.data.procedural import Problem
from semrl_jax.data.prompts import PromptDataset, PromptExample
from semrl_jax.data.rows import (
    DATA_SOURCE_FIELD,
    MAX_REPORTED_BAD_ROWS,
    BadRows,
    row_reader,
)
from semrl_jax.data.templates import AUTO, chosen_template, prompt_renderer
from semrl_jax.data.tokenizer import Tokenizer
from semrl_jax.support.errors import UserError

TOO_LONG = ("drop", "keep")

_CHUNK_ROWS, _CHUNK_CHARS = 2048, 2**22  # rendered and tokenised in one call
_PROGRESS_S = 5.0

FilePath = str | os.PathLike[str]


def load_prompts(
    paths: FilePath | Sequence[FilePath],
    tokenizer: Tokenizer,
    *,
    row_format: str = "question_answer",
    question_fields: str | Sequence[str] = ("question",),
    answer_field: str = "answer",
    answer_after: str = "",
    reader: Any = None,
    template: str = AUTO,
    system_prompt: str = "",
    shots: Sequence[tuple[str, str]] = (),
    max_prompt_tokens: int = 512,
    add_special_tokens: bool = True,
    skip_bad_rows: bool = False,
    too_long: str = "drop",
    num_rows: int = 0,
    data_source: str = "",
    keep_columns: bool = False,
    needs_answer: bool = True,
    field_prefix: str = "data.",
    report: Callable[[str], object] | None = None,
) -> PromptDataset:
    """Loads JSON Lines (.jsonl) and Parquet (.parquet) files, in the order given.

    Args:
      paths: the files.
      tokenizer: see `tokenizer.load_tokenizer`.
      row_format, question_fields, answer_field, answer_after: see `rows.row_reader`. The data
        source of a row is its field "data_source", else the file's name without suffix.
      reader: replaces these four: reads rows as a `rows.RowReader` does, see `rows_of_files`.
      template, system_prompt, shots: see `templates.prompt_renderer`; "simplerl" rows have theirs.
      max_prompt_tokens: the limit, template and special tokens included.
      add_special_tokens: see `encoding.special_prefix`.
      skip_bad_rows: leave bad rows out and count them, instead of raising.
      too_long: "drop" leaves out a prompt above the limit; "keep" keeps it, for benchmarks, whose
        size must not change. Both count it.
      num_rows: maximum number of rows to read over all files, bad ones included; 0 reads all.
      data_source: replaces the data source of every row; "" does not.
      keep_columns: whether the examples keep their rows, for a verifier that takes them, and their
        questions.
      needs_answer: whether a row without an answer is bad; else its answer is "".
      field_prefix: stands before the names of these arguments in error messages.
      report: gets one line for each of the first bad rows and of the first long prompts that are
        kept, totals at the end, and every few seconds the progress.

    Raises:
      UserError: if an argument is wrong, a file is missing, unreadable, empty or given twice, a row
        is bad and bad rows are not skipped, or no prompt within the limit is left. The message
        names the file, the line (counted from 1) and the field.
    """
    files = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files = [pathlib.Path(path) for path in files]
    reader = reader or row_reader(
        row_format,
        question_fields,
        answer_field,
        answer_after,
        keep_columns=keep_columns,
        needs_answer=needs_answer,
        field_prefix=field_prefix,
    )
    if row_format == "simplerl" and template not in ("plain", AUTO):
        raise UserError(
            f"{field_prefix}template={template!r:.200} must be 'auto' or 'plain' with "
            "row_format='simplerl': these rows already include a template."
        )
    template = "plain" if row_format == "simplerl" else chosen_template(template, tokenizer)
    if too_long not in TOO_LONG:
        raise UserError(f"too_long={too_long!r} is unknown; choose from {TOO_LONG}.")
    if max_prompt_tokens < 1 or num_rows < 0:
        raise UserError(
            f"max_prompt_tokens={max_prompt_tokens} must be at least 1 and num_rows={num_rows} at "
            "least 0."
        )
    render = prompt_renderer(
        template, tokenizer, system_prompt=system_prompt, shots=shots, field_prefix=field_prefix
    )
    prefix = special_prefix(tokenizer, template, add_special_tokens)
    bad_rows = BadRows(skip_bad_rows, report)
    rows = itertools.islice(rows_of_files(files, reader, bad_rows), num_rows or None)
    examples: list[PromptExample] = []
    long_lengths: list[int] = []
    num_read = 0
    reported_s = time.monotonic()
    for chunk in _chunks(rows):
        good = [(num_read + i, *row) for i, row in enumerate(chunk) if row is not None]
        num_read += len(chunk)
        prompts = render([problem.question for _, _, problem in good])
        token_ids = encode(tokenizer, prompts, prefix)
        for (index, where, problem), prompt, ids in zip(good, prompts, token_ids, strict=True):
            if not ids:
                bad_rows.add(where, RowError("the tokenizer has no token for any of its text."))
                continue
            source = data_source or problem.data_source
            if len(ids) > max_prompt_tokens:
                long_lengths.append(len(ids))
                if too_long == "drop":
                    continue
                if report and len(long_lengths) <= MAX_REPORTED_BAD_ROWS:
                    report(
                        f"benchmark {source}: {where}: the prompt has {len(ids)} tokens, more than "
                        f"max_prompt_tokens={max_prompt_tokens}; it is not sampled and counts as "
                        "wrong."
                    )
            ids = np.array(ids, np.int32)
            # Benchmarks and files of generated responses show it.
            question = problem.question if too_long == "keep" or keep_columns else ""
            kept = (problem.columns, question, problem.problem_type, template)
            examples.append(PromptExample(prompt, ids, problem.answer, source, index, *kept))
        if report and time.monotonic() - reported_s > _PROGRESS_S:
            report(f"{num_read} rows of prompt data read")
            reported_s = time.monotonic()
    dataset = PromptDataset(tuple(examples), len(long_lengths), bad_rows.count)
    names = ", ".join(map(str, files))
    if bad_rows.count == num_read:
        raise UserError(f"{names}: all {num_read} rows are bad; the first: {bad_rows.first}")
    if len(long_lengths) == num_read - bad_rows.count:
        raise UserError(
            f"{names}: none of the {dataset.num_too_long} prompts has at most max_prompt_tokens="
            f"{max_prompt_tokens} tokens; the shortest has {min(long_lengths)}."
        )
    if report and dataset.num_bad_rows:
        report(f"{dataset.num_bad_rows} of {num_read} rows are bad and left out.")
    if report and dataset.num_too_long > (0 if too_long == "drop" else MAX_REPORTED_BAD_ROWS):
        report(
            f"{dataset.num_too_long} of {num_read} prompts have more than max_prompt_tokens="
            f"{max_prompt_tokens} tokens and "
            f"{'are left out' if too_long == 'drop' else 'count as wrong'}."
        )
    return dataset


def _chunks(rows: Iterable[tuple[str, Any] | None]) -> Iterator[list[tuple[str, Any] | None]]:
    """Rows that are rendered and tokenised together; few if they are long."""
    chunk: list[tuple[str, Any] | None] = []
    num_chars = 0
    for row in rows:
        chunk.append(row)
        num_chars += 0 if row is None else len(row[1].question)
        if len(chunk) == _CHUNK_ROWS or num_chars > _CHUNK_CHARS:
            yield chunk
            chunk, num_chars = [], 0
    if chunk:
        yield chunk


def prompts_of_problems(
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    *,
    template: str,
    system_prompt: str,
    add_special_tokens: bool,
    max_prompt_tokens: int,
    keep_long: bool,
) -> PromptDataset:
    """Prompts of procedural problems, with the rows from which the verifier makes them again.

    Args:
      problems: see `procedural`.
      tokenizer, template, system_prompt, add_special_tokens, max_prompt_tokens: see `load_prompts`.
      keep_long: whether prompts above the limit are kept, as held-out ones are.

    Raises:
      UserError: for a template that cannot be used, or if no prompt is left.
    """
    template = chosen_template(template, tokenizer)
    render = prompt_renderer(template, tokenizer, system_prompt=system_prompt)
    prefix = special_prefix(tokenizer, template, add_special_tokens)
    prompts = render([problem.question for problem in problems])
    token_ids = encode(tokenizer, prompts, prefix)
    examples = tuple(
        PromptExample(
            prompt, np.array(ids, np.int32), problem.answer, problem.source, index,
            columns=problem.row, question=problem.question, template=template,
        )
        for index, (problem, prompt, ids) in enumerate(zip(problems, prompts, token_ids))
        if ids and (keep_long or len(ids) <= max_prompt_tokens)
    )  # fmt: skip
    if not examples:
        raise UserError(
            f"data.reasoning_gym: none of {len(problems)} prompts has at most "
            f"rollout.max_prompt_tokens={max_prompt_tokens} tokens."
        )
    return PromptDataset(examples, len(problems) - len(examples))


def rows_of_files(
    files: Sequence[pathlib.Path],
    reader: Any,
    bad_rows: BadRows,
    field: str = "data.files",
) -> Iterator[tuple[str, Any] | None]:
    """All rows, each with its place in the file; None for a bad row.

    Args:
      files: checked before the first one is read.
      reader: such as `rows.RowReader`. It has `fields`, the names that it reads, and `read(row,
        name)`, which gets the file's name without suffix and raises RowError for a bad row.
      bad_rows: gets every bad row.
      field: the setting that names the files, for error messages.

    Raises:
      UserError: for a file that is missing, empty, unreadable or given twice.
    """
    if not files:
        raise UserError(f"{field} is empty; name a .jsonl or .parquet file.")
    seen: dict[tuple[int, int], pathlib.Path] = {}
    readers = []
    for path in files:
        whole_rows = getattr(reader, "keep_columns", False)
        optional = getattr(reader, "optional_fields", (DATA_SOURCE_FIELD,))
        readers.append(read_rows(path, reader.fields, optional, whole_rows=whole_rows))
        identity = path.stat().st_dev, path.stat().st_ino
        if identity in seen:
            raise UserError(f"{field} has {str(path)!r} twice (as {str(seen[identity])!r}).")
        seen[identity] = path
    for path, rows in zip(files, readers, strict=True):
        is_empty = True
        for where, row in rows:
            is_empty = False
            try:
                found = reader.read(row, path.stem)
            except RowError as e:
                bad_rows.add(where, e)
                yield None
            else:
                yield where, found
        if is_empty:
            raise UserError(f"{path}: the file has no rows.")
