"""What the log of a run holds: its rows, thinned out for a page, and its events."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from configs.default import get_config
from semrl_jax.pages.html import rounded
from semrl_jax.pages.report.evaluations import Evaluated, find_evaluated, rows_of
from semrl_jax.pages.report.panels import OF_SAMPLING, OTHER, STAGES
from semrl_jax.settings.moved import with_present_names
from semrl_jax.settings.rules import flatten
from semrl_jax.support.errors import UserError
from semrl_jax.support.rows import STARTS, read_log, read_rows
from semrl_jax.support.run_directory import distinct_names
from semrl_jax.support.safe_files import jsonable, read_json_object

MAX_ROWS = 1500  # per run, of each kind: with an evaluation, with an event, others
MAX_EVENTS = 300  # per run
DIGITS = 6  # of a number
OF_A_RUN = ("seed", "logging.", "checkpoints.", "profile.")  # seeds of a variant may differ in them
# Keys that count events: key -> what happened.
EVENTS = {
    "policy/update_skipped": "skipped update",
    "critic/update_skipped": "skipped update of the critic",
    "rollout/retries": "retry",
    "rollout/replica_failures": "replica failure",
}
RESUME = "resume"
START_FIELDS = ("time", "devices", "processes", "cores", "system", "python")

Row = Mapping[str, Any]


class RunLog(NamedTuple):
    """The records of a run."""

    name: str  # of the run on the page; no two runs have the same
    path: pathlib.Path
    record: dict[str, Any]  # `config.json`
    rows: list[dict[str, Any]]  # of `metrics.jsonl`, or of `evaluated`
    # Rows of `starts.jsonl`, one per attempt; [] for a run that is older than this file
    starts: list[dict[str, Any]]
    num_left_out: int = 0  # lines of `metrics.jsonl` from the first damaged one on
    # Results of launch.evaluate; such a log is of no directory, and its path only names it
    evaluated: Sequence[Evaluated] = ()

    def damage(self) -> list[str]:
        """What of the log cannot be read, in at most one sentence."""
        if not self.num_left_out:
            return []
        return [
            f"{self.name}: line {len(self.rows) + 1} of metrics.jsonl is damaged; it and the lines "
            f"after it are left out ({self.num_left_out} in all)."
        ]

    @property
    def settings(self) -> dict[str, Any]:
        """Every field of the config by its present name."""
        return with_present_names(flatten(self.record["config"]))


def read_runs(paths: Sequence[pathlib.Path], *, may_be_empty: bool = False) -> list[RunLog]:
    """Reads the logs of runs; UserError if one is no run, named twice, or has no row yet.

    A directory of results of `launch.evaluate` has a log for each run that was evaluated.
    """
    paths = [path.absolute() for path in paths]
    if len(set(paths)) < len(paths):
        raise UserError("a run is named twice; name each run once.")
    runs = [run for path in paths for run in _read(path, may_be_empty)]
    names = distinct_names([run.path for run in runs])
    return [run._replace(name=name) for name, run in zip(names, runs)]


def _read(path: pathlib.Path, may_be_empty: bool) -> list[RunLog]:
    """The log of a run, or the logs of results, without names."""
    try:
        record = read_json_object(path / "config.json")
    except (FileNotFoundError, NotADirectoryError):
        record = {}
    if not isinstance(record.get("run_id"), str) or not isinstance(record.get("config"), dict):
        by_run: dict[str, list[Evaluated]] = {}
        for one in find_evaluated(path):
            by_run.setdefault(one.run, []).append(one)
        if not by_run:
            raise UserError(
                f"{path} is no run; name --workdir of launch.train or launch.sft, or --output of "
                "launch.evaluate."
            )
        return [
            RunLog("", path / run, {"run_id": run, "config": {"policy": run}}, rows_of(found), [],
                   evaluated=found)
            for run, found in by_run.items()
        ]  # fmt: skip
    rows, num_left_out = read_log(path / "metrics.jsonl")
    if not rows and num_left_out:
        raise UserError(f"{path / 'metrics.jsonl'}: line 1 is damaged, so there is no log.")
    if not rows and not may_be_empty:
        raise UserError(f"{path} has no log yet; wait, or follow the run with --serve.")
    starts = [_shown_start(start) for start in read_rows(path / STARTS)]
    return [RunLog("", path, record, rows, starts, num_left_out)]


def _shown_start(start: Row) -> dict[str, Any]:
    """The fields that a page shows, as texts: a damaged file may have anything."""
    changed = start.get("changed")
    return {
        "step": start["step"],
        **{name: str(start[name]) for name in START_FIELDS if start.get(name) is not None},
        "changed": list(map(str, changed)) if isinstance(changed, list) else [],
    }


def thinned(rows: Sequence[Row]) -> list[Row]:
    """At most `MAX_ROWS` rows of each kind, at equal distances, and the last one."""
    kinds: list[list[int]] = [[], [], []]
    for index, row in enumerate(rows):
        if any(key.startswith("eval/") for key in row):
            kinds[0].append(index)
        elif any(row.get(key) for key in EVENTS):
            kinds[1].append(index)
        else:
            kinds[2].append(index)
    kept = {index for kind in kinds for index in kind[:: -(-len(kind) // MAX_ROWS) or 1]}
    return [rows[index] for index in sorted(kept | {len(rows) - 1})] if rows else []


def never_finite(rows: Sequence[Row]) -> list[str]:
    """Keys that were logged and had no finite value at any step."""
    keys = {key for row in rows for key in row}
    return sorted(key for key in keys if all(_number(row.get(key)) is None for row in rows))


def stage_means(rows: Sequence[Row]) -> dict[str, float]:
    """Mean times of the stages over all rows; a row without a stage counts as 0 seconds."""
    needed = {*STAGES, "time/step_s"}  # a log may have hundreds of other keys in 100,000 rows
    found = series([{key: row[key] for key in needed & row.keys()} for row in rows])
    return {key: sum(v or 0.0 for v in found[key]) / len(rows) for key in STAGES if key in found}


def series(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """The values of every key, one per row; None where it was not logged or not finite."""
    keys = sorted({k for row in rows for k, value in row.items() if _number(value) is not None})
    found = {
        key: [_number(row.get(key)) for row in rows] for key in keys if key not in ("step", OTHER)
    }
    for part in OF_SAMPLING:
        if part in found and "time/sample_s" in found:
            pairs = zip(found["time/sample_s"], found[part])
            found["time/sample_s"] = [
                whole if None in (whole, wait) else rounded(max(0.0, whole - wait), DIGITS)
                for whole, wait in pairs
            ]
    if "time/step_s" in found:
        parts = [found[key] for key in STAGES if key in found]
        totals = found["time/step_s"]
        rest = [
            None if total is None else max(0.0, total - sum(part[i] or 0.0 for part in parts))
            for i, total in enumerate(totals)
        ]
        found[OTHER] = [value if value is None else rounded(value, DIGITS) for value in rest]
        if "time/update_s" in found:  # the row of an evaluation alone is no step
            trained = [value is not None for value in found["time/update_s"]]
            found["time/step_s"] = [t if has else None for t, has in zip(totals, trained)]
    return found


def events(run: RunLog) -> list[dict[str, Any]]:
    """The last `MAX_EVENTS` events of a run by step, each with `step`, `kind` and `text`."""
    found = []
    for row in run.rows:
        for key, kind in EVENTS.items():
            if value := _number(row.get(key)):
                text = f"{100 * value:.3g} % of the mini-batches"
                if not key.endswith("update_skipped"):
                    text = f"{value:g} in this step"
                found.append({"step": row["step"], "kind": kind, "text": text})
    for start in run.starts:
        if start is run.starts[0] and not start["step"]:
            continue  # the begin of the run
        text = ", ".join(start["changed"]) or "no setting changed"
        found.append({"step": start["step"], "kind": RESUME, "text": text})
    return sorted(found, key=lambda event: event["step"])[-MAX_EVENTS:]


def variants(runs: Sequence[RunLog]) -> tuple[list[int], list[str]]:
    """The variant of each run, equal but for the seed, and what each has of its own, as text."""
    settings = [
        {name: value for name, value in run.settings.items() if not name.startswith(OF_A_RUN)}
        for run in runs
    ]
    fields = sorted({field for one in settings for field in one})
    texts = [{field: _text(one, field) for field in fields} for one in settings]
    varied = [field for field in fields if len({one[field] for one in texts}) > 1]
    names = [
        ", ".join(f"{field}={str(one[field]).strip(chr(34))}" for field in varied) for one in texts
    ]
    found = list(dict.fromkeys(names))
    return [found.index(name) for name in names], found


def settings_table(runs: Sequence[RunLog]) -> list[list[Any]]:
    """Field, default, and the value in each run, as JSON texts; None where a run lacks it."""
    default = flatten(jsonable(get_config().to_dict()))
    of_runs = [run.settings for run in runs]
    fields = {field for settings in of_runs for field in settings}
    if fields & default.keys():  # those of results have none
        fields |= default.keys()
    return [
        [field, *(_text(settings, field) for settings in (default, *of_runs))]
        for field in sorted(fields)
    ]


def _text(settings: Mapping[str, Any], field: str) -> str | None:
    return json.dumps(settings[field], ensure_ascii=False) if field in settings else None


def _number(value: Any) -> float | None:
    try:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return rounded(value, DIGITS) if is_number else None
    except OverflowError:  # a whole number with hundreds of digits
        return None
