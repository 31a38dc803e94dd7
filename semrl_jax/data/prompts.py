"""Prompt datasets, and the order in which training reads them.

The order depends only on (seed, epoch), and a position is two integers. A run can therefore resume
from its train state with any number of processes and of prompts per step.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from semrl_jax.data import arithmetic
from semrl_jax.data.curricula import Curriculum, PromptHistory, Prompts
from semrl_jax.data.encoding import encode, special_prefix
from semrl_jax.data.tokenizer import Tokenizer
from semrl_jax.support.errors import UserError

_ORDER = 0x0DE4  # third number of the seed: distinct from all streams with two numbers


class Position(NamedTuple):
    """How far a run has read its prompts; it begins at (0, 0)."""

    epoch: int
    cursor: int  # prompts consumed of the epoch
    seen: PromptHistory | None = None  # only with a curriculum


@dataclasses.dataclass(frozen=True, eq=False)
class PromptExample:
    """One prompt."""

    prompt: str  # the text, template included
    prompt_ids: Int[np.ndarray, " P"]  # int32 token ids of that text
    answer: str  # the reference answer, for the verifier
    data_source: str  # where it came from; statistics are computed per data source
    index: int  # its row, counted from 0 over all files before any row is left out
    columns: str = ""  # its row as a JSON object, for a verifier that takes it; "" if none does
    question: str = ""  # without the template; "" if only the prompt is known
    problem_type: str = ""  # of a problem of a benchmark, such as "Algebra"; "" if it has none
    template: str = ""  # with which the prompt was made; "" if that is not known
    given: tuple[Int[np.ndarray, " _"], ...] = ()  # int32 ids of given responses


@dataclasses.dataclass(frozen=True, eq=False)
class PromptDataset:
    """Prompts in file order."""

    examples: tuple[PromptExample, ...]
    is_shuffled: bool = True  # whether an epoch has an order of its own
    curriculum: Curriculum | None = None  # in place of an order, by what was seen

    def __len__(self) -> int:
        return len(self.examples)

    @functools.cached_property
    def numbers(self) -> dict[bytes, int]:
        """Number of each different prompt, by its `prompt_key`, in order."""
        keys = (prompt_key(example.prompt_ids) for example in self.examples)
        return {key: number for number, key in enumerate(dict.fromkeys(keys))}

    @functools.cached_property
    def sources(self) -> tuple[str, ...]:
        return tuple(example.data_source for example in self.examples)


def prompt_key(prompt_ids: Int[np.ndarray, " _"]) -> bytes:
    """The token ids as a key of dictionaries."""
    return np.ascontiguousarray(prompt_ids, np.int32).tobytes()


def prompt_order(size: int, seed: int, epoch: int) -> Int[np.ndarray, " size"]:
    """The order of an epoch: a permutation of 0..size-1, the same on every machine."""
    return np.random.default_rng((seed, epoch, _ORDER)).permutation(size)


def next_prompts(
    dataset: PromptDataset, seed: int, position: Position, count: int
) -> tuple[list[PromptExample], Position]:
    """Reads `count` prompts from a position on, into the next epochs; returns the new position.

    Without a curriculum, two calls in a row read the same as one. ValueError for an empty dataset,
    UserError if the position, with 0 <= cursor <= size, is outside of it.
    """
    rows = next_rows(dataset, seed, position, count)
    return [dataset.examples[row] for row in rows], advanced(dataset, position, count)


def advanced(dataset: PromptDataset, position: Position, count: int) -> Position:
    """The position after `count` more prompts; raises as `next_prompts`."""
    epoch, cursor, seen = Position(*position)
    size = len(dataset)
    if not size:
        raise ValueError("the dataset is empty.")
    if epoch < 0 or not 0 <= cursor <= size or count < 0:
        raise UserError(
            f"position {position} or count {count} does not fit a dataset of {size} prompts."
        )
    more, cursor = divmod(cursor + count, size)
    return Position(epoch + more, cursor, seen)


def next_rows(dataset: PromptDataset, seed: int, position: Position, count: int) -> list[int]:
    """The numbers in the dataset of the prompts that `next_prompts` reads; raises as it."""
    epoch, cursor, seen = advanced(dataset, position, 0)
    size = len(dataset)
    if dataset.curriculum is not None:
        prompts = Prompts(*seen, dataset.sources)
        return dataset.curriculum.draw(prompts, (seed, epoch * size + cursor), count).tolist()
    rows: list[int] = []
    while len(rows) < count:
        order = prompt_order(size, seed, epoch) if dataset.is_shuffled else np.arange(size)
        rows += order[cursor : cursor + count - len(rows)].tolist()
        epoch, cursor = epoch + 1, 0
    return rows


def build_dataset(
    rows: Iterable[tuple[str, str]],
    tokenizer: Tokenizer,
    *,
    data_source: str,
    max_prompt_tokens: int,
    template: str = "",
    add_special_tokens: bool = True,
) -> PromptDataset:
    """Tokenises (prompt, answer) pairs and leaves out long prompts; UserError if none is left."""
    rows = list(rows)
    texts = [prompt for prompt, _ in rows]
    prefix = special_prefix(tokenizer, add_special_tokens=add_special_tokens)
    all_ids = encode(tokenizer, texts, prefix)
    examples = tuple(
        PromptExample(prompt, np.array(ids, np.int32), answer, data_source, i, template=template)
        for i, ((prompt, answer), ids) in enumerate(zip(rows, all_ids, strict=True))
        if 0 < len(ids) <= max_prompt_tokens
    )
    num_empty = sum(not ids for ids in all_ids)
    if num_empty:
        raise UserError(f"data source {data_source!r}: {num_empty} prompts have no token.")
    if not examples:
        raise UserError(
            f"data source {data_source!r}: none of its {len(rows)} prompts has at most "
            f"rollout.max_prompt_tokens={max_prompt_tokens} tokens."
        )
    return PromptDataset(examples)


def arithmetic_prompts(
    tokenizer: Tokenizer, problems: Sequence[arithmetic.Problem], add_special_tokens: bool = True
) -> PromptDataset:
    """Prompts of the quickstart task."""
    return build_dataset(
        [(arithmetic.prompt_text(p), arithmetic.reference_answer(p)) for p in problems],
        tokenizer,
        data_source="arithmetic",
        template=arithmetic.QUESTION_TEMPLATE,
        max_prompt_tokens=arithmetic.MAX_PROMPT_TOKENS,
        add_special_tokens=add_special_tokens,
    )


def dataset_hash(dataset: PromptDataset) -> str:
    """Hex SHA-256 over ids, answer, data source and given responses of every prompt, in order."""
    digest = hashlib.sha256()
    for example in dataset.examples:
        ids = np.ascontiguousarray(example.prompt_ids, "<i4").tobytes()
        given = [np.ascontiguousarray(ids, "<i4").tobytes() for ids in example.given]
        for part in (ids, example.answer.encode(), example.data_source.encode(), *given):
            digest.update(len(part).to_bytes(8, "little"))  # keeps neighbouring parts apart
            digest.update(part)
        if given:
            digest.update(len(given).to_bytes(8, "little"))
    return digest.hexdigest()


def columns_hash(dataset: PromptDataset) -> str:
    """Hex SHA-256 over the rows that a verifier takes, in order; "" if no row was kept."""
    if not any(example.columns for example in dataset.examples):
        return ""
    digest = hashlib.sha256()
    for example in dataset.examples:
        digest.update(hashlib.sha256(example.columns.encode()).digest())
    return digest.hexdigest()
