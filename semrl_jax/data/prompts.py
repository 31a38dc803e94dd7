"""Prompt datasets, and the order in which training reads them.

The order is a pure function of (seed, epoch) and the position two integers, so the train state
holds all there is to resume from, whatever the number of processes or prompts a step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Int

from semrl_jax.data import arithmetic
from semrl_jax.data.files import Row, RowError, read_rows
from semrl_jax.data.rows import DATA_SOURCE_FIELD, BadRows, RowReader, row_reader
from semrl_jax.data.templates import is_chat, prompt_renderer
from semrl_jax.data.tokenizer import Tokenizer
from semrl_jax.errors import UserError

TOO_LONG = ("drop", "refuse")

_ORDER = 0x0DE4  # last in its seed: apart from every stream of two numbers
_CHUNK_ROWS = 2048  # tokenised in one call: the tokenizer's own threads have work
_PROGRESS_S = 5.0

FilePath = str | os.PathLike[str]

Position = tuple[int, int]  # (epoch, prompts consumed of it); a dataset starts at (0, 0)


@dataclasses.dataclass(frozen=True, eq=False)
class PromptExample:
    """One prompt.

    Attributes:
      prompt: the text, template included.
      prompt_ids: int32 token ids of that text.
      answer: the reference answer, for the verifier.
      data_source: where it came from; statistics are kept apart by it.
      index: its row, counted from 0 over all files before any was left out.
    """

    prompt: str
    prompt_ids: Int[np.ndarray, " P"]
    answer: str
    data_source: str
    index: int


@dataclasses.dataclass(frozen=True, eq=False)
class PromptDataset:
    """Prompts in file order, and how many were left out for their length or as bad rows."""

    examples: tuple[PromptExample, ...]
    num_too_long: int = 0
    num_bad_rows: int = 0

    def __len__(self) -> int:
        return len(self.examples)


def prompt_order(size: int, seed: int, epoch: int) -> Int[np.ndarray, " size"]:
    """The order of an epoch: a permutation of 0..size-1, the same on every machine."""
    return np.random.default_rng((seed, epoch, _ORDER)).permutation(size)


def next_prompts(
    dataset: PromptDataset, seed: int, position: Position, count: int
) -> tuple[list[PromptExample], Position]:
    """Reads on from a position, into the next epochs if need be.

    Args:
      dataset: not empty.
      seed: not negative.
      position: (epoch, cursor), 0 <= cursor <= size.
      count: prompts to read; may exceed the dataset.

    Returns:
      The prompts and the position after them. Reading in two calls gives what one call gives.

    Raises:
      ValueError: if the dataset is empty, or the position lies outside of it.
    """
    epoch, cursor = position
    size = len(dataset)
    if not size:
        raise ValueError("the dataset is empty.")
    if epoch < 0 or not 0 <= cursor <= size or count < 0:
        raise ValueError(
            f"position {position} or count {count} does not fit a dataset of {size} prompts; is it "
            "another dataset than the one the run began with?"
        )
    prompts: list[PromptExample] = []
    while True:
        if cursor == size:
            epoch, cursor = epoch + 1, 0
        take = min(count - len(prompts), size - cursor)
        if not take:
            return prompts, (epoch, cursor)
        order = prompt_order(size, seed, epoch)[cursor : cursor + take]
        prompts += [dataset.examples[i] for i in order]
        cursor += take


def build_dataset(
    rows: Iterable[tuple[str, str]],
    tokenizer: Tokenizer,
    *,
    data_source: str,
    max_prompt_tokens: int,
    add_special_tokens: bool = False,
) -> PromptDataset:
    """Tokenises (prompt, answer) pairs and leaves out prompts above the limit.

    Args:
      rows: prompt texts with template, and reference answers.
      tokenizer: see `tokenizer.load_tokenizer`.
      data_source: stored with every example.
      max_prompt_tokens: the limit, in tokens.
      add_special_tokens: whether the tokenizer adds what it adds by default, such as a
        beginning-of-sequence token; training and evaluation must agree.

    Raises:
      UserError: if no prompt is left.
    """
    rows = list(rows)
    texts = [prompt for prompt, _ in rows]
    all_ids = _token_ids(tokenizer, texts, add_special_tokens)
    examples = tuple(
        PromptExample(prompt, np.array(ids, np.int32), answer, data_source, i)
        for i, ((prompt, answer), ids) in enumerate(zip(rows, all_ids, strict=True))
        if 0 < len(ids) <= max_prompt_tokens
    )
    num_empty = sum(not ids for ids in all_ids)
    if num_empty:
        raise UserError(f"data source {data_source!r}: {num_empty} prompts have no token.")
    if not examples:
        raise UserError(
            f"data source {data_source!r}: none of its {len(rows)} prompts has at most "
            f"data.max_prompt_tokens={max_prompt_tokens} tokens."
        )
    return PromptDataset(examples, len(rows) - len(examples))


def arithmetic_prompts(tokenizer: Tokenizer, seed: int, size: int) -> PromptDataset:
    """Training prompts of the quickstart task."""
    return _arithmetic_dataset(tokenizer, arithmetic.training_problems(seed, size))


def arithmetic_held_out_prompts(
    tokenizer: Tokenizer, size: int = arithmetic.NUM_HELD_OUT
) -> PromptDataset:
    """The first `size` of the 512 test prompts of the quickstart task; training has none."""
    return _arithmetic_dataset(tokenizer, arithmetic.held_out_problems()[:size])


def load_prompts(
    paths: FilePath | Sequence[FilePath],
    tokenizer: Tokenizer,
    *,
    row_format: str = "question_answer",
    question_fields: str | Sequence[str] = ("question",),
    answer_field: str = "answer",
    answer_after: str = "",
    template: str = "plain",
    system_prompt: str = "",
    max_prompt_tokens: int = 512,
    add_special_tokens: bool = False,
    skip_bad_rows: bool = False,
    too_long: str = "drop",
    num_rows: int = 0,
    report: Callable[[str], object] | None = None,
) -> PromptDataset:
    """Loads JSON Lines (.jsonl) and Parquet (.parquet) files, in the order given.

    Args:
      paths: the files.
      tokenizer: see `tokenizer.load_tokenizer`.
      row_format, question_fields, answer_field, answer_after: see `rows.row_reader`. A row's field
        "data_source" names its source, else the file's name without ending does.
      template, system_prompt: see `templates.prompt_renderer`; "plain" for "simplerl" rows.
      max_prompt_tokens: the limit, template and special tokens included.
      add_special_tokens: see `build_dataset`; False with a chat template, which holds them itself.
      skip_bad_rows: leave bad rows out, count them and report the first few, instead of refusing.
      too_long: what becomes of a prompt above the limit: "drop" leaves it out and counts it,
        "refuse" is for sets that must not shrink.
      num_rows: rows to read at most, over all files and bad ones included; 0 reads all.
      report: takes a line for each of the first bad rows, for what was left out, and every few
        seconds one that says how far the reading is.

    Raises:
      UserError: if an argument does not fit, a file is missing, unreadable, empty or given twice,
        a row is bad or a prompt too long and that is not to be skipped, or no prompt is left. The
        message names the file, the line (counted from 1) and the field.
    """
    files = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files = [pathlib.Path(path) for path in files]
    reader = row_reader(row_format, question_fields, answer_field, answer_after)
    if row_format == "simplerl" and template != "plain":
        raise UserError(
            f"data.template={template!r:.200} must be 'plain' with data.row_format='simplerl', "
            "whose rows hold their template."
        )
    if add_special_tokens and is_chat(template):
        raise UserError(
            f"data.add_special_tokens must be False with data.template={template!r:.200}: the "
            "chat template writes them itself."
        )
    if too_long not in TOO_LONG:
        raise UserError(f"too_long={too_long!r} is unknown; choose from {TOO_LONG}.")
    if max_prompt_tokens < 1 or num_rows < 0:
        raise UserError(
            f"max_prompt_tokens={max_prompt_tokens} must be at least 1 and num_rows={num_rows} at "
            "least 0."
        )
    render = prompt_renderer(template, tokenizer, system_prompt=system_prompt)
    rows = enumerate(itertools.islice(_rows_of_files(files, reader), num_rows or None))
    bad_rows = BadRows(skip_bad_rows, report)
    examples: list[PromptExample] = []
    read, shortest_too_long, num_too_long = 0, 0, 0
    reported_s = time.monotonic()
    while chunk := list(itertools.islice(rows, _CHUNK_ROWS)):
        read += len(chunk)
        problems = []
        for index, (path, where, row) in chunk:
            try:
                problems.append((index, where, reader.read(row, path.stem)))
            except RowError as e:
                bad_rows.add(where, e)
        prompts = render([problem.question for _, _, problem in problems])
        token_ids = _token_ids(tokenizer, prompts, add_special_tokens)
        for (index, where, problem), prompt, ids in zip(problems, prompts, token_ids, strict=True):
            if not ids:
                bad_rows.add(where, RowError("the tokenizer has no token for any of its text."))
            elif len(ids) <= max_prompt_tokens:
                ids = np.array(ids, np.int32)
                source = problem.data_source
                examples.append(PromptExample(prompt, ids, problem.answer, source, index))
            elif too_long == "refuse":
                raise UserError(
                    f"{where}: the prompt has {len(ids)} tokens, more than "
                    f"max_prompt_tokens={max_prompt_tokens}; raise that limit, or take the row out."
                )
            else:
                num_too_long += 1
                shortest_too_long = min(shortest_too_long or len(ids), len(ids))
        if report and time.monotonic() - reported_s > _PROGRESS_S:
            report(f"{read} rows of prompt data read")
            reported_s = time.monotonic()
    names = ", ".join(map(str, files))
    if bad_rows.count == read:
        raise UserError(f"{names}: all {read} rows are bad; the first: {bad_rows.first}")
    if not examples:
        raise UserError(
            f"{names}: none of the {num_too_long} prompts has at most "
            f"max_prompt_tokens={max_prompt_tokens} tokens; the shortest has {shortest_too_long}."
        )
    if report and bad_rows.count:
        report(f"{bad_rows.count} of {read} rows are bad and left out.")
    if report and num_too_long:
        report(
            f"{num_too_long} of {read} prompts have more than max_prompt_tokens="
            f"{max_prompt_tokens} tokens and are left out."
        )
    return PromptDataset(tuple(examples), num_too_long, bad_rows.count)


def dataset_hash(dataset: PromptDataset) -> str:
    """Fingerprints what training takes from a dataset, in its order.

    Returns:
      Hex SHA-256 over the token ids, the answer and the data source of every prompt.
    """
    digest = hashlib.sha256()
    for example in dataset.examples:
        ids = np.ascontiguousarray(example.prompt_ids, "<i4").tobytes()
        for part in (ids, example.answer.encode(), example.data_source.encode()):
            digest.update(len(part).to_bytes(8, "little"))  # so that no part runs into the next
            digest.update(part)
    return digest.hexdigest()


def _arithmetic_dataset(tokenizer: Tokenizer, problems: list[arithmetic.Problem]) -> PromptDataset:
    return build_dataset(
        [(arithmetic.prompt_text(p), arithmetic.reference_answer(p)) for p in problems],
        tokenizer,
        data_source="arithmetic",
        max_prompt_tokens=arithmetic.MAX_PROMPT_TOKENS,
    )


def _rows_of_files(
    files: Sequence[pathlib.Path], reader: RowReader
) -> Iterator[tuple[pathlib.Path, str, Row]]:
    """All rows, each with its file and the words where it stands."""
    if not files:
        raise UserError("data.files is empty; name a .jsonl or .parquet file.")
    seen: dict[tuple[int, int], pathlib.Path] = {}
    readers = []
    for path in files:  # all are opened before one is read: a wrong name shows at once
        readers.append(read_rows(path, reader.fields, (DATA_SOURCE_FIELD,)))
        identity = path.stat().st_dev, path.stat().st_ino
        if identity in seen:
            raise UserError(f"data.files has {str(path)!r} twice (as {str(seen[identity])!r}).")
        seen[identity] = path
    for path, rows in zip(files, readers, strict=True):
        is_empty = True
        for where, row in rows:
            is_empty = False
            yield path, where, row
        if is_empty:
            raise UserError(f"{path}: the file has no rows.")


def _token_ids(tokenizer: Tokenizer, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    if not texts:  # which the tokenizer takes for no batch
        return []
    return tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
