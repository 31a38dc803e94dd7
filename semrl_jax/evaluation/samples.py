"""Graded responses to held-out problems, as scores and pages see them, and their files."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from semrl_jax import data
from semrl_jax.sampling.scoring import Scored
from semrl_jax.support import response_files
from semrl_jax.support.errors import UserError
from semrl_jax.support.response_files import IDS, METRICS, SERIES

NOT_SAMPLED = "prompt_too_long"  # finish reason of the samples of a problem that was not sampled


class Sample(NamedTuple):
    """One response to one problem; a row of samples.parquet, see `response_files.COLUMNS`."""

    benchmark: str
    group_id: int  # place of the problem in the benchmark, from 0
    sample_index: int
    question: str
    reference: str
    problem_type: str
    row: str
    response: str
    extracted: str | None
    correct: bool
    score: float
    boxed: bool
    verifier_error: str
    finish_reason: str  # of the rollout; or NOT_SAMPLED. Such a sample is wrong and has no tokens
    num_tokens: int
    mean_logprob: float
    # Value by label, such as "effective_rank_velocity"; NaN where not valid
    metrics: Mapping[str, float]
    turn_characters: Sequence[int] = ()  # of an episode
    turn_rewards: Sequence[float] = ()
    # Columns of TOKENS and SERIES that the response has, until it is written: scores and pages
    # need none.
    tokens: Mapping[str, np.ndarray] = MappingProxyType({})

    @property
    def num_turns(self) -> int:
        """Turns of the policy that are trained on in an episode; 0 without an environment."""
        return len(self.turn_rewards)


COLUMNS = Sample._fields[: Sample._fields.index("metrics")]
OF_EPISODES = ("turn_characters", "turn_rewards")
TOKENS = (*IDS, "response_mask", "conversations")


def of_row(row: Mapping[str, Any]) -> Sample:
    """The sample of a row of a table of responses; a metric that is null was not measured."""
    metrics = {
        name.removeprefix(METRICS): value
        for name, value in row.items()
        if name.startswith(METRICS) and value is not None
    }
    more: dict[str, Any] = {
        name: np.asarray(row[name]).tolist() for name in OF_EPISODES if row.get(name) is not None
    }
    if tokens := {n: v for n, v in row.items() if n in TOKENS or n.startswith(SERIES)}:
        more["tokens"] = tokens
    return Sample(*(row[name] for name in COLUMNS), metrics, **more)


def sampled(
    items: Scored,
    problems: Mapping[int, tuple[int, data.PromptExample]],
    first_sample: int,
    text: Callable[[np.ndarray], str],
) -> list[Sample]:
    """The samples of scored responses; `problems` has place and problem of each group."""
    columns = items.columns(["turn_rewards", *TOKENS], text)
    samples = []
    for values in zip(*columns.values()):
        row = dict(zip(columns, values))
        place, problem = problems[row["group_id"]]
        fields = {"sample_index": row["sample_index"] - first_sample}
        samples.append(of_row(row | _of_problem(problem, place) | fields))
    return samples


def not_sampled(problem: data.PromptExample, place: int, num_samples: int) -> list[Sample]:
    """The samples of a problem whose prompt is too long: all are wrong."""
    row = _of_problem(problem, place) | {
        "reference": problem.answer,
        "response": "",
        "extracted": None,
        "correct": False,
        "score": 0.0,
        "boxed": False,
        "verifier_error": "",
        "finish_reason": NOT_SAMPLED,
        "num_tokens": 0,
        "mean_logprob": math.nan,
        "prompt_ids": problem.prompt_ids,
        "response_ids": np.zeros(0, np.int32),
    }
    return [of_row(row | {"sample_index": index}) for index in range(num_samples)]


def _of_problem(problem: data.PromptExample, place: int) -> dict[str, Any]:
    return {
        "benchmark": problem.data_source,
        "group_id": place,
        "question": problem.question or problem.prompt,
        "problem_type": problem.problem_type,
        "row": problem.columns,
    }


def table_of(samples: Sequence[Sample]) -> pa.Table:
    """The samples as a table of responses."""
    columns = {name: [getattr(sample, name) for sample in samples] for name in COLUMNS}
    if any(sample.turn_rewards for sample in samples):
        columns |= {name: [getattr(sample, name) for sample in samples] for name in OF_EPISODES}
    for name in dict.fromkeys(name for sample in samples for name in sample.tokens):
        columns[name] = [sample.tokens.get(name) for sample in samples]
    for label in sorted({label for sample in samples for label in sample.metrics}):
        columns[METRICS + label] = [sample.metrics.get(label) for sample in samples]
    return response_files.table_of(columns)


def read_samples(file: pathlib.Path) -> list[Sample]:
    """The samples of a file, in its order, without tokens; UserError if it has no samples."""
    if not file.is_file():
        raise UserError(f"{file} is not a file; name a samples.parquet of an evaluation.")
    tables = response_files.batches(file, COLUMNS, (METRICS, *OF_EPISODES))
    return [of_row(row) for table in tables for row in table.to_pylist()]


def by_problem(samples: Iterable[Sample]) -> list[list[Sample]]:
    """The samples of one benchmark as one list per problem, in (group, sample) order."""
    found: dict[int, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: (sample.group_id, sample.sample_index)):
        found.setdefault(sample.group_id, []).append(sample)
    return list(found.values())
