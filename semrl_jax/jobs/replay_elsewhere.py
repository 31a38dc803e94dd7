"""Re-runs in other processes: of another checkout, or of a run of several processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from semrl_jax.jobs.replay import (
    Compared,
    Finding,
    Replay,
    attempts,
    inherited,
    known_records,
    named,
    replayed,
    write_start,
)
from semrl_jax.runs.lifecycle import EXIT_PREEMPTED
from semrl_jax.sampling.recorded import StepRecord
from semrl_jax.support.errors import UserError
from semrl_jax.support.rows import STARTS, read_rows
from semrl_jax.support.safe_files import jsonable, write_json

ROOT = pathlib.Path(__file__).parents[2]
POLL_S = 0.1
END_S = 600.0  # for the processes to save a checkpoint after the last step
# A checkout without records compares responses and weights.
WITHOUT_RECORDS = {
    "logging.rollouts_every_steps": 1, "checkpoints.every_steps": 1, "checkpoints.keep": 10**6,
}  # fmt: skip
_FIELDS = """
import json
from configs import default
from semrl_jax.settings.rules import flatten
print(json.dumps(sorted(flatten(default.get_config()))))
"""


def records_of(replay: Replay, code: pathlib.Path | None = None) -> Iterator[StepRecord]:
    """The records of a re-run, in this process or in others, see `replay_elsewhere`.

    Steps have the settings of their attempt; inherited steps, of the run that made them.

    Args:
      code: a checkout that runs it; None: this one.
    """
    with tempfile.TemporaryDirectory(prefix="semrl-replay-") as temporary:
        part = replay
        for run, first, last in _parts(replay.run, replay.first, replay.last):
            save = replay.save if last == replay.last else pathlib.Path(temporary) / str(last)
            part = part._replace(run=run, first=first, last=last, save=save)
            yield from _records_of(part, code)
            part = part._replace(source=save, weights="")


def _parts(run: pathlib.Path, first: int, last: int) -> Iterator[tuple[pathlib.Path, int, int]]:
    """Runs of which each made some of the steps with the same settings, and these steps."""
    if parent := inherited(run, first):
        yield from _parts(parent.run, first, min(last, parent.step - 1))
        first = parent.step
    if first <= last:
        begins = [first, *(step for step in attempts(run) if first < step <= last), last + 1]
        for begin, end in itertools.pairwise(begins):
            yield run, begin, end - 1


def _records_of(replay: Replay, code: pathlib.Path | None) -> Iterator[StepRecord]:
    start_ = next(iter(read_rows(replay.run / STARTS)[-1:]), {})
    processes = start_.get("processes", 1)
    if code is None and processes == 1:
        return replayed(replay)
    if replay.weights:
        why = f"--code={code}" if code else f"a run of {processes} processes"
        raise UserError(f"--weights={replay.weights} has no meaning with {why}; leave it out.")
    devices = start_.get("devices", "")
    return replayed_elsewhere(replay, code, processes, devices)


@contextlib.contextmanager
def begun_at(
    replay: Replay, begin: int, is_changed: bool, compared: Compared
) -> Iterator[tuple[Replay, Finding | None]]:
    """The re-run from a step on at which something changes, and a difference before this step.

    Without a checkpoint of this step, the steps before it are run unchanged.
    """
    if not is_changed or begin == replay.first:
        yield replay, None
        return
    with tempfile.TemporaryDirectory(prefix="semrl-replay-") as temporary:
        state = pathlib.Path(temporary) / "state"
        before = Replay(replay.run, replay.first, begin - 1, recorded=replay.recorded, save=state)
        found = compared.first(known_records(replay.run), records_of(before))
        yield replay._replace(first=begin, source=state), found


def replayed_elsewhere(
    replay: Replay, code: pathlib.Path | None, processes: int, devices: str
) -> Iterator[StepRecord]:
    """The records of the steps by `launch.train` of a checkout; they come when the last step ended.

    UserError if it cannot run, with its last line.
    """
    root = (code or ROOT).absolute()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), os.getcwd()]),
        "PYTHONSAFEPATH": "1",  # the checkout comes before the directory of this process
    }
    with tempfile.TemporaryDirectory(prefix="semrl-replay-") as temporary:
        home = pathlib.Path(temporary)
        directory, settings = home / "run", home / "settings.json"
        with named(replay.run, directory):
            config = replay.config()
            known = _fields_of(root, environment)
            if "logging.replay_every" not in known:
                config.update_from_flattened_dict(WITHOUT_RECORDS)
            if replay.save is not None:
                config.checkpoints.extra_steps = (replay.last + 1,)
            write_start(replay, directory, config)
            record = json.loads((directory / "config.json").read_text("utf-8"))
            record["config"] = _only(jsonable(config.to_dict()), known)
            write_json(directory / "config.json", record)
            write_json(settings, record)
            command = ["launch.train", f"--config={root}/configs/recorded.py:{settings}"]
            command += [f"--workdir={directory}", "--quiet"]
            if processes > 1:
                command[:1] = _local(processes, devices, replay.run)
            _run(command, environment, directory, replay.last, root)
        if replay.save is not None:
            shutil.copytree(directory, replay.save, dirs_exist_ok=True)
        yield from map(known_records(directory), range(replay.first, replay.last + 1))


def _local(processes: int, devices: str, run: pathlib.Path) -> list[str]:
    """The command and its flags for several processes on this machine."""
    found = re.fullmatch(r"([0-9]+) x cpu", devices)
    if not found:
        raise UserError(
            f"{run} had {processes} processes with {devices}: several processes are replayed on "
            "the CPUs of one machine alone; choose a run of one process, or compare two runs "
            "by their records (--bisect)."
        )
    each = int(found[1]) // processes
    return ["launch.local", f"--processes={processes}", f"--devices_per_process={each}", "--"]


def _fields_of(root: pathlib.Path, environment: dict[str, str]) -> set[str]:
    """The settings that a checkout knows, by full name."""
    if not (root / "semrl_jax").is_dir() or not (root / "launch").is_dir():
        raise UserError(f"--code={root} is no checkout of semrl_jax; name its directory.")
    command = [sys.executable, "-c", _FIELDS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"--code={root} cannot be run: {_last_line(done.stderr)}")
    return set(json.loads(done.stdout.splitlines()[-1]))


def _only(settings: dict, known: set[str], prefix: str = "") -> dict:
    """The settings without those of this version alone."""
    return {
        name: _only(value, known, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in settings.items()
        if isinstance(value, dict) or f"{prefix}{name}" in known
    }


def _run(
    command: list[str],
    environment: dict[str, str],
    directory: pathlib.Path,
    last: int,
    root: pathlib.Path,
) -> None:
    """Runs `command` until the row of the last step is written; UserError if it ends before."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            while process.poll() is None and not _has(directory, last):
                time.sleep(POLL_S)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            code = process.wait(END_S)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        text = output.read()
    if code not in (0, EXIT_PREEMPTED) or not _has(directory, last):
        raise UserError(f"the re-run with {root} ended with exit code {code}: {_last_line(text)}")


def _has(directory: pathlib.Path, step: int) -> bool:
    rows = read_rows(directory / "metrics.jsonl")
    return bool(rows) and rows[-1]["step"] >= step


def _last_line(text: str) -> str:
    return next(iter(text.strip().splitlines()[-1:]), "no output")
