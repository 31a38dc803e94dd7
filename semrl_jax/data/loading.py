"""From problem files to a prompt dataset: reads rows, applies the template and tokenises."""

from __future__ import annotations

import itertools
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from semrl_jax.data.encoding import encode, encode_given, special_prefix
from semrl_jax.data.prompt_rows import MAX_REPORTED_BAD_ROWS, BadRows, Problem, row_reader
from semrl_jax.data.prompts import PromptDataset, PromptExample
from semrl_jax.data.row_files import RowError, read_rows
from semrl_jax.data.templates import AUTO, chosen_template, prompt_renderer
from semrl_jax.data.tokenizer import Tokenizer
from semrl_jax.support.errors import UserError

_CHUNK_ROWS, _CHUNK_CHARS = 2048, 2**22  # rendered and tokenised in one call
_PROGRESS_S = 5.0

FilePath = str | os.PathLike[str]
PlacedRows = Iterator[tuple[str, Any] | None]  # each with its place in the file; None: bad


def load_prompts(
    paths: FilePath | Sequence[FilePath],
    tokenizer: Tokenizer,
    reader: Any = None,
    *,
    template: str = AUTO,
    system_prompt: str = "",
    shots: Sequence[tuple[str, str]] = (),
    add_special_tokens: bool = True,
    max_prompt_tokens: int = 512,
    max_response_tokens: int = 0,
    keep_long: bool = False,
    keep_questions: bool = False,
    skip_bad_rows: bool = False,
    num_rows: int = 0,
    rows_seed: int | None = None,
    data_source: str = "",
    field_prefix: str = "data.",
    report: Callable[[str], object] = lambda line: None,
) -> PromptDataset:
    """Loads JSON Lines (.jsonl) and Parquet (.parquet) files, in the order given.

    Args:
      reader: see `rows_of_files`; None is `rows.row_reader()`, fields "question" and "answer".
      template, system_prompt, shots: see `templates.prompt_renderer`; "simplerl" rows have theirs.
      add_special_tokens: see `encoding.special_prefix`.
      max_prompt_tokens: the limit, template and special tokens included.
      max_response_tokens: the limit of given responses, if the reader reads any.
      keep_long: prompts above the limit are kept, for benchmarks, whose size must not change,
        instead of left out.
      keep_questions: whether prompts keep their questions, which need memory. Benchmarks and
        prompts with whole rows always keep them.
      skip_bad_rows: leave bad rows out and count them, instead of raising.
      num_rows: maximum number of rows to take over all files, bad ones included; 0 takes all.
      rows_seed: chooses these rows at random, in their order; those of a smaller number are among
        them. None: the first ones, and no others are read.
      data_source: replaces the data source of every row; "" does not.
      field_prefix: stands before "template" in error messages.
      report: gets a line for the first bad rows and kept long prompts, totals, and the progress.

    UserError names file, line (from 1) and field.
    """
    files = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files = [pathlib.Path(path) for path in files]
    reader = reader or row_reader()
    if reader.has_template:
        if template not in ("plain", AUTO):
            raise UserError(
                f"{field_prefix}template={template!r:.200} must be 'auto' or 'plain' with "
                "row_format='simplerl': these rows already include a template."
            )
        template = "plain"
    template = chosen_template(template, tokenizer)
    render = prompt_renderer(
        template, tokenizer, system_prompt=system_prompt, shots=shots, field_prefix=field_prefix
    )
    prefix = special_prefix(tokenizer, template, add_special_tokens)
    bad_rows = BadRows(skip_bad_rows, report)
    rows = rows_of_files(files, reader, bad_rows)
    if num_rows:
        rows = _taken(rows, num_rows, rows_seed)
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
            try:
                given = encode_given(tokenizer, problem.given, max_response_tokens)
            except RowError as error:
                bad_rows.add(where, error)
                continue
            source = data_source or problem.data_source
            if len(ids) > max_prompt_tokens:
                long_lengths.append(len(ids))
                if not keep_long:
                    continue
                if len(long_lengths) <= MAX_REPORTED_BAD_ROWS:
                    report(
                        f"benchmark {source}: {where}: the prompt has {len(ids)} tokens, more than "
                        f"max_prompt_tokens={max_prompt_tokens}; it is not sampled and counts as "
                        "wrong."
                    )
            # Benchmarks and files of generated responses show the question.
            shown = keep_questions or keep_long or reader.keep_columns
            problem = problem._replace(question=problem.question if shown else "")
            examples.append(_example(problem, prompt, ids, index, template, source, given))
        if time.monotonic() - reported_s > _PROGRESS_S:
            report(f"{num_read} rows of prompt data read")
            reported_s = time.monotonic()
    names = ", ".join(map(str, files))
    num_bad, num_long = bad_rows.count, len(long_lengths)
    if num_bad == num_read:
        raise UserError(f"{names}: all {num_read} rows are bad; the first: {bad_rows.first}")
    if num_long == num_read - num_bad:
        raise UserError(
            f"{names}: none of the {num_long} prompts has at most max_prompt_tokens="
            f"{max_prompt_tokens} tokens; the shortest has {min(long_lengths)}."
        )
    if num_bad:
        report(f"{num_bad} of {num_read} rows are bad and left out.")
    if num_long > (MAX_REPORTED_BAD_ROWS if keep_long else 0):
        report(
            f"{num_long} of {num_read} prompts have more than max_prompt_tokens="
            f"{max_prompt_tokens} tokens and {'count as wrong' if keep_long else 'are left out'}."
        )
    return PromptDataset(tuple(examples))


def _taken(rows: PlacedRows, count: int, seed: int | None) -> PlacedRows:
    """The first rows, or with a seed a random choice in their order."""
    if seed is None:
        return itertools.islice(rows, count)
    everything = list(rows)
    order = np.random.default_rng(seed).permutation(len(everything))
    return (everything[index] for index in sorted(order[:count].tolist()))


def _example(
    problem: Problem,
    prompt: str,
    ids: Sequence[int],
    index: int,
    template: str,
    source: str,
    given: Sequence[np.ndarray] = (),
) -> PromptExample:
    return PromptExample(
        prompt, np.array(ids, np.int32), problem.answer, source, index, problem.columns,
        problem.question, problem.problem_type, template, tuple(given),
    )  # fmt: skip


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
    """Prompts of problems, with the rows that make them again; arguments as of `load_prompts`."""
    template = chosen_template(template, tokenizer)
    render = prompt_renderer(template, tokenizer, system_prompt=system_prompt)
    prefix = special_prefix(tokenizer, template, add_special_tokens)
    prompts = render([problem.question for problem in problems])
    token_ids = encode(tokenizer, prompts, prefix)
    examples = tuple(
        _example(problem, prompt, ids, index, template, problem.data_source)
        for index, (problem, prompt, ids) in enumerate(zip(problems, prompts, token_ids))
        if ids and (keep_long or len(ids) <= max_prompt_tokens)
    )
    if not examples:
        raise UserError(
            f"data.reasoning_gym: none of {len(problems)} prompts has at most "
            f"rollout.max_prompt_tokens={max_prompt_tokens} tokens."
        )
    return PromptDataset(examples)


def rows_of_files(
    files: Sequence[pathlib.Path], reader: Any, bad_rows: BadRows, field: str = "data.files"
) -> PlacedRows:
    """All rows, as the reader returns them; UserError for a file that cannot be read, or twice.

    The reader has `fields` and `optional_fields`, which it reads, `keep_columns`, whether it needs
    all others too, and `read(row, name)`, which gets the file's name without suffix and raises
    RowError. For `load_prompts` it also has `has_template`, whether a question includes its own.
    """
    if not files:
        raise UserError(f"{field} is empty; name a .jsonl or .parquet file.")
    seen: dict[tuple[int, int], pathlib.Path] = {}
    readers = []
    for path in files:
        wanted = reader.fields, reader.optional_fields
        readers.append(read_rows(path, *wanted, whole_rows=reader.keep_columns))
        identity = path.stat().st_dev, path.stat().st_ino
        if identity in seen:
            raise UserError(f"{field} has {str(path)!r} twice (as {str(seen[identity])!r}).")
        seen[identity] = path
    for path, rows in zip(files, readers, strict=True):
        is_empty = True
        for where, row in rows:
            is_empty = False
            try:
                if isinstance(row, RowError):
                    raise row
                found = reader.read(row, path.stem)
            except RowError as e:
                bad_rows.add(where, e)
                yield None
            else:
                yield where, found
        if is_empty:
            raise UserError(f"{path}: the file has no rows.")
