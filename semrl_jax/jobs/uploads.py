"""Sends the figures of finished evaluations to the trackers of `config.logging`."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections

from semrl_jax.runs.trackers import OPTIONAL, Kept, check_trackers
from semrl_jax.settings.rules import flatten
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import jsonable, read_json_object, write_json
from semrl_jax.types import config_hash

SENT = "uploads.json"  # in the output directory: "TRACKER:PROJECT" -> ids of the runs sent there


def check_upload(config: ml_collections.ConfigDict) -> None:
    """UserError if `evaluation.upload` is set without a tracker, or its package is missing."""
    if not config.evaluation.upload:
        return
    if not any(config.logging[name] for name in OPTIONAL):
        fields = " or ".join(f"logging.{name}" for name in OPTIONAL)
        raise UserError(f"evaluation.upload=True needs a tracker: set {fields}.")
    check_trackers(config.logging)


def upload(
    config: ml_collections.ConfigDict,
    evaluations: Mapping[str, Sequence[tuple[int, pathlib.Path]]],
    output: pathlib.Path,
    warn: Callable[[str], None],
) -> None:
    """Sends each policy as a run with a row for each step; equal figures are sent once.

    `evaluations` are step and file of results, by policy. UserError if a tracker refuses a run.
    """
    settings = flatten(jsonable(config.to_dict()))
    file = output / SENT
    sent = read_json_object(file) if file.exists() else {}
    for policy, files in evaluations.items():
        rows = {step: _scalars(read_json_object(results)) for step, results in sorted(files)}
        run_id = config_hash({"policy": policy, "rows": list(rows.items())})[:16]
        is_only = len(evaluations) == len(files) == 1
        workdir = output if is_only else output / policy
        for name, kind in OPTIONAL.items():
            project = config.logging[name]
            ids = sent.setdefault(f"{name}:{project}", [])
            if not project or run_id in ids:
                continue
            workdir.mkdir(exist_ok=True)  # for the files of Weights & Biases
            failures: list[str] = []
            tracker = Kept(kind(project, workdir, run_id, settings), failures.append)
            for step, row in rows.items():
                tracker.write(step, row)
            tracker.close({})
            if failures:
                warn(f"{failures[0]}; the same command sends the figures again")
                continue
            ids.append(run_id)
            write_json(file, {place: of_place for place, of_place in sent.items() if of_place})


def _scalars(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Finite numbers, under the keys of a training log."""
    return {
        f"eval/{benchmark}/{name}": float(value)
        for benchmark, figures in found.items()
        for name, value in figures.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
