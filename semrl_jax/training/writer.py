"""What a run leaves behind: metrics.jsonl, TensorBoard events, sampled responses."""

from __future__ import annotations

import json
import math
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from semrl_jax.training.scoring import ScoredRollout


class MetricWriter:
    """Writes one flat JSON object a step, and the same numbers as TensorBoard events.

    Rows at or after `first_step` are removed on opening, so that a resumed run holds no step twice;
    the events are made anew from the rows, since an event file cannot be cut.
    """

    def __init__(self, workdir: pathlib.Path, first_step: int):
        # Imports torch where that is installed: two seconds that others need not wait.
        from tensorboardX import SummaryWriter

        self._file = workdir / "metrics.jsonl"
        rows = [row for row in read_rows(self._file) if row["step"] < first_step]
        staging = self._file.with_suffix(".writing")
        staging.write_text("".join(json.dumps(row) + "\n" for row in rows))
        staging.rename(self._file)
        events = workdir / "tensorboard"
        shutil.rmtree(events, ignore_errors=True)
        self._events = SummaryWriter(str(events))
        for row in rows:
            self._add_events(row)
        self._out = open(self._file, "a")  # noqa: SIM115 - closed by close()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends one row; it is on its way to the disk when this returns."""
        row = {"step": step} | {
            # JSON has no NaN; a skipped update's loss is null.
            name: float(value) if math.isfinite(value) else None
            for name, value in sorted(scalars.items())
        }
        self._out.write(json.dumps(row) + "\n")
        self._out.flush()
        self._add_events(row)

    def close(self) -> None:
        self._out.close()
        self._events.close()

    def _add_events(self, row: Mapping[str, float | int | None]) -> None:
        for name, value in row.items():
            if name != "step" and value is not None:
                self._events.add_scalar(name, value, row["step"])


def read_rows(file: pathlib.Path) -> list[dict[str, float | int | None]]:
    """Rows of a metrics.jsonl; a torn last line, left by a kill, is dropped."""
    rows = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def remove_rollouts(directory: pathlib.Path, first_step: int) -> None:
    """Removes rollout files at or after `first_step`, and files a kill left half-written."""
    for file in directory.glob("step_*"):
        if file.suffix != ".parquet" or int(file.stem.removeprefix("step_")) >= first_step:
            file.unlink()


def write_rollouts(
    directory: pathlib.Path,
    step: int,
    scored: Sequence[ScoredRollout],
    decode: Callable[[np.ndarray], str],
) -> None:
    """Writes the rollouts of one step as Parquet; the file appears whole or not at all."""
    directory.mkdir(exist_ok=True)
    rollouts = [item.rollout for item in scored]
    columns = {
        "step": [step] * len(scored),
        "group_id": [rollout.group_id for rollout in rollouts],
        "sample_index": [rollout.sample_index for rollout in rollouts],
        "prompt": [decode(rollout.prompt_ids) for rollout in rollouts],
        "response": [item.response for item in scored],
        "reference": [item.reference for item in scored],
        "score": [item.verdict.score for item in scored],
        "correct": [item.verdict.correct for item in scored],
        "finish_reason": [rollout.finish_reason for rollout in rollouts],
        "prompt_ids": [rollout.prompt_ids for rollout in rollouts],
        "response_ids": [rollout.response_ids for rollout in rollouts],
        "rollout_logprobs": [rollout.rollout_logprobs for rollout in rollouts],
    } | {
        f"metrics/{name}": [rollout.metrics[name] for rollout in rollouts]
        for name in rollouts[0].metrics
    }
    file = directory / f"step_{step:06d}.parquet"
    staging = file.with_suffix(".writing")
    pq.write_table(pa.table(columns), staging)
    staging.rename(file)
