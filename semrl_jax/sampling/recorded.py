"""Records of steps, and a source that gives recorded responses in place of sampled ones."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from semrl_jax import models
from semrl_jax.data.prompts import Position
from semrl_jax.metrics.measurements import Measurement, MetricKey
from semrl_jax.rewards import Verdict
from semrl_jax.sampling.scoring import Scored, ScoredRollout
from semrl_jax.sampling.source import Sample
from semrl_jax.support import response_files
from semrl_jax.support.clock import Clock
from semrl_jax.support.errors import UserError
from semrl_jax.support.parquet import ParquetFile
from semrl_jax.support.response_files import METRICS, SCORES
from semrl_jax.types import TOKEN_ARRAYS, Rollout, VersionSpan, WeightVersion

RECORDS = "records"  # directory in that of a run
_FACTS, _SUM = b"semrl_step", b"semrl_step_crc32"  # keys in the metadata of the file
_NEEDED = ("group_id", "sample_index", "prompt_ids", "response_ids", "rollout_logprobs")
EXPERTS = "routed_experts"  # a column of bytes, and the fact that describes them
_NOWHERE = ("turn_characters",)  # needs the tokenizer, and nothing here reads it


class StepRecord(NamedTuple):
    """What is known of a step; `facts` that are not known are left out.

    Attributes:
      columns: one row per response, in (group, sample) order, see `support.response_files`.
      facts: a JSON object. `row` has scalars of the log, and `sampled` the names of those that the
        sampling gave. `position` is the place in the data after the step, `num_layers` the number
        of measured layers of hidden states. `routed_experts` has the dtype of this column, and its
        numbers of layers and of experts per token. `before`, `after` and `gradients` are
        `traces.Sums`.
    """

    step: int
    columns: pa.Table
    facts: Mapping[str, Any]


def file_of(run: pathlib.Path, step: int) -> pathlib.Path:
    """Where the record of a step is in a run directory."""
    return run / RECORDS / f"step_{step:06d}.parquet"


def write_record(file: pathlib.Path, record: StepRecord) -> int:
    """Writes a record, complete or not at all; returns its size in bytes."""
    file.parent.mkdir(exist_ok=True)
    facts = json.dumps({"step": record.step, **record.facts}).encode()
    metadata = {_FACTS: facts, _SUM: str(zlib.crc32(facts))}
    response_files.write(file, record.columns.replace_schema_metadata(metadata))
    return file.stat().st_size


def read_record(file: pathlib.Path) -> StepRecord | None:
    """The record in a file; None if there is none, UserError if it is damaged."""
    if not file.is_file():
        return None
    way = "remove it, and the step is compared by its other files"
    try:
        columns = response_files.read(file, _NEEDED)
        metadata = ParquetFile(file).schema.metadata
        if zlib.crc32(metadata[_FACTS]) != int(metadata[_SUM]):
            raise UserError(f"{file} has been altered")
        facts = json.loads(metadata[_FACTS])
        record = StepRecord(facts.pop("step"), columns, facts)
    except UserError as error:
        raise UserError(f"{str(error).rstrip('.')}; {way}.") from None
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{file} is no record of a step; {way}.") from None
    if file.name != file_of(file, record.step).name:
        raise UserError(f"{file} is the record of step {record.step}; {way}.")
    return record


def columns_of(
    scored: Scored,
    tokens: Mapping[str, np.ndarray] = {},
    rewards: Sequence[float] | np.ndarray = (),
) -> pa.Table:
    """The table of responses.

    Args:
      tokens: [B, T] values of response tokens by column.
      rewards: of the update, of each response.
    """
    arrays = [array.name for array in TOKEN_ARRAYS if array.is_recorded]
    columns = scored.columns(arrays)
    for name in _NOWHERE:
        columns.pop(name, None)
    rollouts = [item.rollout for item in scored]
    columns["weight_spans"] = [
        [
            number
            for span in rollout.versions
            for number in (span.version.step, span.start, span.end)
        ]
        for rollout in rollouts
    ]
    for name, values in tokens.items():
        columns[name] = [row[: len(of.response_ids)] for row, of in zip(values, rollouts)]
    if len(rewards):
        columns["reward"] = list(map(float, rewards))
    experts = [rollout.routed_experts for rollout in rollouts]
    if any(each is not None for each in experts):
        columns[EXPERTS] = [None if each is None else each.tobytes() for each in experts]
    if scored.mean_states is not None:
        columns["mean_states"] = list(scored.mean_states.reshape(len(scored), -1))
    return response_files.table_of(columns)


def scored_of(record: StepRecord) -> Scored:
    """The scored responses of a record."""
    columns, num_layers = record.columns, record.facts["num_layers"]
    rows = columns.to_pylist()
    metrics = {}
    for name in columns.column_names:
        if name.startswith(METRICS):
            values = columns[name].to_numpy().astype(np.float32)
            valid = ~np.isnan(values)
            key = MetricKey.parse(name.removeprefix(METRICS))
            metrics[key] = Measurement(np.where(valid, values, np.float32(0)), valid)
    means = None
    if "mean_states" in columns.column_names:
        means = np.array([row["mean_states"] for row in rows], np.float32)
        means = means.reshape(len(rows), num_layers, -1)
    return Scored([_item_of(row, record.facts.get(EXPERTS)) for row in rows], metrics, means)


def _item_of(row: Mapping[str, Any], routing: tuple[str, int, int] | None) -> ScoredRollout:
    arrays = {
        array.name: np.array(row[array.name], array.dtype)
        for array in TOKEN_ARRAYS
        if array.dtype and row.get(array.name) is not None
    }
    if row.get(EXPERTS) is not None:
        dtype, *shape = routing
        arrays[EXPERTS] = np.frombuffer(row[EXPERTS], dtype).reshape(-1, *shape)
    spans = np.reshape(row["weight_spans"], (-1, 3)).tolist()
    is_episode = "turn_rewards" in arrays
    rollout = Rollout(
        sample_id=f"{row['group_id']}/{row['sample_index']}",
        group_id=row["group_id"],
        sample_index=row["sample_index"],
        rollout_raw_logprobs=None,
        finish_reason=row["finish_reason"],
        versions=tuple(
            VersionSpan(WeightVersion("", "", step, ""), start, end) for step, start, end in spans
        ),
        environment_error=row["verifier_error"] if is_episode else "",
        parent=row.get("parent"),
        num_prefix=row.get("num_prefix", 0),
        hint=row.get("hint"),
        **arrays,
    )
    verdict = Verdict(
        score=row["score"],
        correct=row["correct"],
        boxed=row["boxed"],
        extracted=row["extracted"],
        error=row["verifier_error"],
        parts={
            name.removeprefix(SCORES): value
            for name, value in row.items()
            if name.startswith(SCORES) and value is not None
        },
    )
    return ScoredRollout(rollout, row["response"], row["reference"], verdict)


@dataclasses.dataclass
class Recorded:
    """A source that reads its batches from the records of a run, and samples nothing."""

    run: pathlib.Path
    replays_routers: bool = False

    def offer(self, weights: Sequence[models.Params], step: int) -> None:
        """No weights are needed."""

    def next(self, step: int, position: Position, clock: Clock) -> Sample:
        """The batch of the record; UserError if the step has none."""
        with clock("sample"):
            record = read_record(file_of(self.run, step))
        if record is None:
            raise UserError(
                f"{self.run} has no record of step {step} "
                "(logging.replay_every); choose recorded steps, or sample again."
            )
        if self.replays_routers and EXPERTS not in record.columns.column_names:
            raise UserError(
                f"{self.run} has no routed_experts of step {step}, because it ran without "
                "rollout.router_replay; set it to False."
            )
        epoch, cursor = record.facts["position"]
        row, sampled = record.facts["row"], record.facts["sampled"]
        return Sample(
            scored_of(record),
            position._replace(epoch=epoch, cursor=cursor),
            {name: math.nan if row[name] is None else row[name] for name in sampled},
        )
