"""Writes the records of a run: metrics.jsonl, TensorBoard events, sampled responses."""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from semrl_jax.runs.trackers import Tracker
from semrl_jax.sampling.recorded import EXPERTS, StepRecord, columns_of
from semrl_jax.sampling.scoring import Scored
from semrl_jax.support import response_files
from semrl_jax.support.rows import read_log, read_rows
from semrl_jax.support.safe_files import remove, replacing, through_no_link
from semrl_jax.training.loop import StepResult
from semrl_jax.types import TOKEN_ARRAYS

# Rows whose last values are the final figures of a run.
FINAL = ("eval/", "reward/correct", "reward/mean", "sft/loss")


class MetricWriter:
    """Writes one flat JSON object per step, and gives the same numbers to trackers.

    Opening removes rows at or after `first_step`, so that no step occurs twice in a resumed run. A
    tracker that still has the rows of an earlier start gets none of them again but the last, which
    may have had an evaluation only. `is_first`: it has none, because all rows are of another run.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        first_step: int,
        trackers: Sequence[Tracker],
        *,
        is_first: bool = False,
    ):
        self._trackers = trackers
        self._file = workdir / "metrics.jsonl"
        earlier = read_rows(self._file)
        self._last_step = earlier[-1]["step"] if earlier and not is_first else -1
        self._final: dict[str, float | int] = {}
        rows = [row for row in earlier if row["step"] < first_step]
        with replacing(self._file) as out:
            out.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        for row in rows:
            self._track(row)
        self._out = open(self._file, "a", opener=through_no_link)  # noqa: SIM115 - see close()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends one row and flushes it."""
        row = {"step": step} | {
            # JSON has no NaN. For example, the loss of a skipped update is null.
            name: float(value) if math.isfinite(value) else None
            for name, value in sorted(scalars.items())
        }
        self._out.write(json.dumps(row) + "\n")
        self._out.flush()
        self._track(row)

    def close(self) -> None:
        self._out.close()
        for tracker in self._trackers:
            tracker.close(self._final)

    def _track(self, row: Mapping[str, float | int | None]) -> None:
        step = row["step"]
        scalars = {k: v for k, v in row.items() if k != "step" and v is not None}
        is_final = {name: value for name, value in scalars.items() if name.startswith(FINAL)}
        self._final |= {f"final/{name}": value for name, value in is_final.items()}
        for tracker in self._trackers:
            if tracker.repeats or step >= self._last_step:
                tracker.write(step, scalars)


def keep_damaged_log(workdir: pathlib.Path, warn: Callable[[str], None]) -> None:
    """Copies a log with a damaged line, because opening it removes that line and those after it."""
    file, copy = workdir / "metrics.jsonl", workdir / "damaged_metrics.jsonl"
    rows, num_left_out = read_log(file)
    if not num_left_out:
        return
    with replacing(copy) as out:
        out.write(file.read_bytes())
    warn(
        f"line {len(rows) + 1} of {file} is damaged; it and what follows ({num_left_out} lines) "
        f"are kept in {copy.name} alone"
    )


def remove_rollouts(directory: pathlib.Path, first_step: int) -> None:
    """Removes recorded responses at or after `first_step`, and incomplete files of a kill."""
    # Step s is repeated with its evaluation, which comes before the update.
    for file in directory.glob("*"):
        name = re.fullmatch(r"(?:step|eval)_(\d+)\.(parquet|writing)", file.name)
        if name and (name[2] == "writing" or int(name[1]) >= first_step):
            remove(file)


def record_of(result: StepResult) -> StepRecord:
    """The record of a step that has a trace."""
    trace, scalars = result.trace, result.scalars
    facts = {
        # JSON has no NaN.
        "row": {name: x if math.isfinite(x) else None for name, x in scalars.items()},
        "sampled": list(trace.sampled),
        "position": [int(number) for number in result.state.position],
        "num_layers": 0
        if result.scored.mean_states is None
        else result.scored.mean_states.shape[1],
        **_routing(result.scored),
        "before": trace.before,
        "gradients": trace.gradients,
        "after": trace.after,
    }
    rewards = np.reshape(trace.rewards, -1)
    return StepRecord(result.step, columns_of(result.scored, trace.arrays, rewards), facts)


def _routing(scored: Scored) -> dict[str, list]:
    """The fact of `StepRecord` about experts, if any are known."""
    experts = (item.rollout.routed_experts for item in scored)
    found = next((each for each in experts if each is not None), None)
    return {} if found is None else {EXPERTS: [found.dtype.name, *found.shape[1:]]}


def write_rollouts(
    directory: pathlib.Path,
    step: int,
    scored: Scored,
    text: Callable[[np.ndarray], str],
    benchmarks: Sequence[str] | None = None,
) -> None:
    """Writes responses as Parquet, complete or not at all; with `benchmarks`, of an evaluation."""
    directory.mkdir(exist_ok=True)
    columns = scored.columns([array.name for array in TOKEN_ARRAYS if array.is_recorded], text)
    columns["step"] = [step] * len(scored)
    if benchmarks is not None:
        columns["benchmark"] = benchmarks
    for name in ("prompt", "response"):
        columns[name] = [text(getattr(item.rollout, f"{name}_ids")) for item in scored]
    file = directory / f"{'step' if benchmarks is None else 'eval'}_{step:06d}.parquet"
    response_files.write(file, response_files.table_of(columns))
