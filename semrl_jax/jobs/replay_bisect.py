"""Finds where two sides of re-runs part: settings, runs, or revisions of the code."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from semrl_jax.jobs.replay import Compared, Finding, Replay, known_records, settings_at, steps_of
from semrl_jax.jobs.replay_elsewhere import ROOT, begun_at, records_of
from semrl_jax.runs.differences import PROMPTS, START, differences, is_compared
from semrl_jax.sampling.recorded import StepRecord, file_of, read_record, write_record
from semrl_jax.settings.rules import flatten
from semrl_jax.support.errors import UserError
from semrl_jax.support.rows import read_rows
from semrl_jax.support.run_directory import record_of, setting_of


class Change(NamedTuple):
    """What the second side has that the first one lacks."""

    settings: Mapping[str, Any] = {}
    weights: str = ""
    code: pathlib.Path | None = None

    def __bool__(self) -> bool:
        return bool(self.settings or self.weights or self.code)

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in self.settings.items()]
        parts += [f"weights of {self.weights}"] * bool(self.weights)
        return ", ".join(parts + [f"code of {self.code}"] * bool(self.code))


def against_record(
    replay: Replay, begin: int, change: Change, compared: Compared
) -> Finding | None:
    """The first difference between what the run recorded and its re-run with a change."""
    with begun_at(replay, begin, bool(change), compared) as (asked, early):
        if early is not None:
            return early
        known = known_records(replay.run)
        return compared.first(known, _changed(asked, change), 0 if change else begin)


def against_unchanged(
    replay: Replay, begin: int, change: Change, compared: Compared
) -> Finding | None:
    """The first difference between two re-runs, without and with a change, in all numbers.

    UserError if the unchanged re-run differs from the run already.
    """
    known = known_records(replay.run)
    with begun_at(replay, begin, True, compared) as (asked, early), _kept() as directory:
        early = early or compared.first(known, _keeping(records_of(asked), directory))
        if early is not None:
            raise UserError(
                f"the unchanged re-run of {replay.run} differs already ({early.first}); without "
                "--bisect, its page shows how."
            )
        return compared.first(_read(directory), _changed(asked, change))


def _changed(replay: Replay, change: Change) -> Iterator[StepRecord]:
    changed = replay._replace(changes=change.settings, weights=change.weights)
    return records_of(changed, change.code)


@contextlib.contextmanager
def _kept() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="semrl-replay-") as directory:
        yield pathlib.Path(directory)


def _keeping(records: Iterator[StepRecord], directory: pathlib.Path) -> Iterator[StepRecord]:
    """Writes the records on their way."""
    with contextlib.closing(records):
        for record in records:
            write_record(file_of(directory, record.step), record)
            yield record


def _read(directory: pathlib.Path) -> Callable[[int], StepRecord]:
    return lambda step: read_record(file_of(directory, step))


def settings_apart(
    left: pathlib.Path, right: pathlib.Path, step: int
) -> dict[str, tuple[Any, Any]]:
    """The settings that differ in a step of two runs, by full name."""
    runs = left, right
    pair = [flatten(record_of(run).get("config", {})) | settings_at(run, step) for run in runs]
    names = sorted(pair[0].keys() | pair[1].keys())
    found = {name: (pair[0].get(name), pair[1].get(name)) for name in names}
    return {name: values for name, values in found.items() if values[0] != values[1]}


def between_runs(
    left: pathlib.Path, right: pathlib.Path, first: int, last: int | None, compared: Compared
) -> Finding | None:
    """Where two runs part.

    Their logs name a step. If both have a record of it, these are compared, else both runs are
    replayed up to it from a checkpoint that both have, or from their beginning.
    """
    runs = left, right
    steps = [steps_of(run) for run in runs]
    logs = [{row["step"]: row for row in read_rows(run / "metrics.jsonl")} for run in runs]
    common = [step for step in steps[0].rows if step in steps[1].rows and step >= first]
    common = [step for step in common if last is None or step <= last]
    if not common:
        raise UserError(f"{left} and {right} have no step in common in this range.")
    known = [known_records(run) for run in runs]
    parted = next((s for s in common if _rows_differ(*(log[s] for log in logs))), None)
    if parted is None:
        for step in common:
            pair = [records(step) for records in known]
            compared.note(*pair)
            if found := list(differences(*pair)):
                return Finding(found, *pair)
        return None
    both = [step for step in steps[0].checkpoints if step in steps[1].checkpoints]
    pair = [records(parted) for records in known]
    found = list(differences(*pair))
    are_recorded = all("gradients" in record.facts for record in pair)
    # vLLM samples other tokens in a re-run.
    is_final = any(setting_of(run, "rollout", "engine") == "vllm" for run in runs)
    if is_final or (are_recorded and found[0].stage != START):
        compared.note(*pair)
        return Finding(found, *pair)
    for begin in (*(step for step in reversed(both) if step <= parted), 0):
        asked = [Replay(run, begin, parted) for run in runs]
        with _kept() as directory:
            for _ in _keeping(records_of(asked[0]), directory):
                pass
            found = compared.first(_read(directory), records_of(asked[1]))
        if found is None:
            raise UserError(
                f"the logs of {left} and {right} part at step {parted}, but their re-runs do not: "
                "replay each run alone."
            )
        if found.first.stage != START or found.first.step > begin or not begin:
            break
    return found


def _rows_differ(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    keys = filter(is_compared, left.keys() & right.keys())
    return any(left[key] != right[key] for key in keys)


def is_at_start(finding: Finding) -> bool:
    """Whether two runs differ from their beginning on: in the weights, or in the prompts."""
    return finding.first.step == 0 and finding.first.stage in (START, PROMPTS)


class Revisions(NamedTuple):
    """Where two revisions part."""

    finding: Finding
    revision: str  # the first one with other numbers
    subject: str  # first line of its message
    tried: int  # revisions that were run


def between_revisions(
    replay: Replay, good: str, bad: str, compared: Compared, say: Callable[[str], None]
) -> Revisions:
    """The first revision whose re-run differs from that of `good`, by halves.

    Revisions are checked out into temporary directories. UserError if the ends do not differ, or if
    the good one differs from the run.
    """
    _git("rev-parse", "--git-dir", why="--good and --bad need a checkout of git, not a package")
    ends = [_git("rev-parse", "--verify", f"{name}^{{commit}}", why=f"{name!r} is no revision")
            for name in (good, bad)]  # fmt: skip
    line = _git("rev-list", "--reverse", "--first-parent", f"{ends[0]}..{ends[1]}").split()
    if not line:
        raise UserError(f"--good={good} must be before --bad={bad}; name an earlier revision.")
    with _kept() as directory:

        def run(revision: str) -> Finding | None:
            say(f"revision {_git('log', '-1', '--format=%h %s', revision)}")
            with _checkout(revision) as code:
                return Compared().first(_read(directory), records_of(replay, code))

        say(f"revision {_git('log', '-1', '--format=%h %s', ends[0])}")
        with _checkout(ends[0]) as code:
            records = _keeping(records_of(replay, code), directory)
            early = compared.first(known_records(replay.run), records)
        if early is not None:
            raise UserError(
                f"--good={good} differs already from what {replay.run} recorded ({early.first}); "
                "name a revision that replays it."
            )
        found = run(ends[1])
        if found is None:
            raise UserError(
                f"--good={good} and --bad={bad} do not differ in steps {replay.first} to "
                f"{replay.last}; name more steps, or other revisions."
            )
        low, high, tried = -1, len(line) - 1, 2  # line[low] is good, line[high] is bad
        while high - low > 1:
            middle = (low + high) // 2
            tried += 1
            if (other := run(line[middle])) is None:
                low = middle
            else:
                high, found = middle, other
    subject = _git("log", "-1", "--format=%s", line[high])
    return Revisions(found, line[high], subject, tried)


def _git(*arguments: str, why: str = "") -> str:
    """The output of a git command in this checkout; UserError if it fails."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError("--good and --bad need git, which is not installed.") from None
    if done.returncode:
        reason = " ".join(done.stderr.split())
        raise UserError(f"{why or 'git ' + arguments[0]}: {reason}")
    return done.stdout.strip()


@contextlib.contextmanager
def _checkout(revision: str) -> Iterator[pathlib.Path]:
    """A directory with the files of a revision, removed at the end."""
    with _kept() as directory:
        code = directory / "code"
        _git("worktree", "add", "--detach", str(code), revision)
        try:
            yield code
        finally:
            _git("worktree", "remove", "--force", str(code))
