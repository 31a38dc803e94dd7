"""Runs of one config with several settings and seeds: planned, started, summed up.

Each run is a `launch.train` of its own, in OUTPUT/VARIANT/seedN, so a sweep goes on as its runs do.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from semrl_jax.pages.report import over_seeds
from semrl_jax.pages.report.page import write_page
from semrl_jax.runs.checkpoint_files import checkpoint_steps
from semrl_jax.runs.lifecycle import DONE, EXIT_FAILED, EXIT_MISTAKE, EXIT_PREEMPTED
from semrl_jax.support.console import Bar, Reporter, duration, short_path
from semrl_jax.support.errors import UserError
from semrl_jax.support.guard import die_with_parent
from semrl_jax.support.rows import read_rows
from semrl_jax.support.run_directory import record_of
from semrl_jax.support.safe_files import replacing

POLL_S = 0.2
MAX_NAME = 100  # characters of a directory


class Variant(NamedTuple):
    """Settings that the runs of all seeds share; the texts are as in flags."""

    settings: tuple[tuple[str, str], ...]
    given: str = ""  # a name; without one, the settings are it

    @property
    def name(self) -> str:
        return (
            self.given
            or ", ".join(f"{field}={value}" for field, value in self.settings)
            or "config"
        )

    @property
    def directory(self) -> str:
        """The name as a directory: without the sections, and without odd characters."""
        short = [f"{field.rpartition('.')[2]}={value}" for field, value in self.settings]
        name = self.given or ",".join(short) or "config"
        return re.sub(r"[^\w.,=+-]+", "_", name)[:MAX_NAME]


class Planned(NamedTuple):
    """A run of a sweep."""

    variant: Variant
    seed: int
    workdir: pathlib.Path
    num_steps: int | None  # None: the data says how many, with training.num_epochs

    @property
    def name(self) -> str:
        return f"{self.variant.name}, seed {self.seed}"

    @property
    def log(self) -> pathlib.Path:
        """What the run prints."""
        return self.workdir.with_name(f"{self.workdir.name}.log")

    @property
    def is_finished(self) -> bool:
        """Whether it has its last checkpoint, and has ended after its last evaluation and export.

        One with `num_epochs` never counts as finished: it may have been given more of them.
        """
        folder = self.workdir / "checkpoints"
        steps = checkpoint_steps(folder) if folder.is_dir() else []
        if self.num_steps is None or not steps or not self.log.is_file():
            return False
        done = re.findall(DONE.format(r"(\d+)"), self.log.read_text(errors="replace"))
        return bool(done) and steps[-1] >= int(done[-1]) >= self.num_steps

    @property
    def recorded(self) -> str:
        """The settings in its record, without the seed; "" if there is none."""
        settings = record_of(self.workdir).get("config")
        return json.dumps(settings | {"seed": 0}, sort_keys=True) if settings else ""

    def flags(self) -> list[str]:
        settings = [*self.variant.settings, ("seed", str(self.seed))]
        return [
            f"--workdir={self.workdir}", *(f"--config.{field}={value}" for field, value in settings)
        ]  # fmt: skip


def variants_of(vary: Sequence[str], variants: Sequence[str], count: int = 0) -> list[Variant]:
    """The variants of a sweep; UserError for an entry of another form, or two equal ones.

    `vary` has FIELD=VALUE,VALUE, all combinations, or `count` drawn of them; `variants` has
    "NAME: FIELD=VALUE FIELD=VALUE", one each in addition, with or without a name; "" is the config
    itself.
    """
    axes = []
    for entry in vary:
        field, _, values = entry.partition("=")
        if not field or not values:
            raise UserError(
                f"--vary={entry!r} must be FIELD=VALUE,VALUE, such as rollout.group_size=4,8."
            )
        axes.append([(field, value) for value in values.split(",")])
    found = [Variant(settings) for settings in itertools.product(*axes)] if axes else []
    if count:
        if count > len(found):
            raise UserError(
                f"--random={count} is more than the {len(found)} combinations of --vary."
            )
        found = random.Random(0).sample(found, count)
    for entry in variants:
        name, settings = re.fullmatch(r"(?:([^=]*):(?:\s+|$))?(.*)", entry, re.DOTALL).groups()
        pairs = [part.partition("=") for part in settings.split()]
        if any(not (field and sign) for field, sign, _ in pairs):
            raise UserError(
                f"--variant={entry!r} must be FIELD=VALUE FIELD=VALUE, or empty, with or without "
                "NAME: before it."
            )
        found.append(Variant(tuple((field, value) for field, _, value in pairs), name or ""))
    if any(field == "seed" for variant in found for field, _ in variant.settings):
        raise UserError("seed is no setting of a variant; --seeds names the seeds of all.")
    names = [variant.directory for variant in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two variants are named {twice[0]!r}; leave one out.")
    first: dict[tuple[tuple[str, str], ...], Variant] = {}
    for one in found:
        if (other := first.setdefault(one.settings, one)) is not one:
            raise UserError(
                f"{other.name!r} and {one.name!r} have the same settings; leave one out."
            )
    return found or [Variant(())]


def plan(
    variants: Sequence[Variant],
    seeds: Sequence[int],
    output: pathlib.Path,
    num_steps: int,
    num_epochs: int = 0,
) -> list[Planned]:
    """All runs, seed by seed, so that every variant has as many seeds at any time."""
    found = []
    for variant in variants:
        lengths = {"num_steps": num_steps, "num_epochs": num_epochs}
        for name in lengths:
            own = dict(variant.settings).get(f"training.{name}", str(lengths[name]))
            if not own.isdecimal():
                raise UserError(f"training.{name}={own} must be a whole number.")
            lengths[name] = int(own)
        found.append((variant, None if lengths["num_epochs"] else lengths["num_steps"]))
    return [
        Planned(variant, seed, output / variant.directory / f"seed{seed}", steps)
        for seed in seeds
        for variant, steps in found
    ]


class Sweep:
    """Starts the runs that are not finished; a slot has further arguments of one run at a time."""

    def __init__(
        self, arguments: Sequence[str], slots: Sequence[Sequence[str]], reporter: Reporter
    ):
        self._command = [sys.executable, "-m", "launch.train", *arguments]
        self._slots, self._reporter = slots, reporter
        self._running: dict[int, tuple[Planned, subprocess.Popen, float]] = {}
        self._signal = 0

    def check(self, planned: Sequence[Planned]) -> None:
        """Makes the dry run of one seed of each variant; UserError of the first that fails.

        A finished run is not started again, so only this finds that it had other settings: of those
        with the same record, one is checked. A run that is there and not finished says so itself.
        """
        first = {
            (run.variant, run.recorded): run
            for run in reversed(planned)
            if run.is_finished or not run.workdir.exists()
        }
        for number, run in enumerate(reversed(first.values()), 1):
            self._reporter.line(f"checking {run.variant.name}, {number} of {len(first)}")
            command = [*self._command, *self._slots[0], *run.flags(), "--dry_run"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr or done.stdout).strip().splitlines()[-1:]
                reason = " ".join(reason).removeprefix("python -m launch.train: ")
                raise UserError(f"{run.variant.name}: {reason}")

    def run(self, planned: Sequence[Planned]) -> int:
        """Runs to the end; returns 0, 75 after a signal, or 1 if one failed; UserError: mistake."""
        waiting = collections.deque(run for run in planned if not run.is_finished)
        total, failed = len(planned), []
        handlers = {n: signal.signal(n, self._end) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            with self._reporter.bar("sweep", total, "runs", done=total - len(waiting)) as bar:
                told = False
                while (waiting and not self._signal) or self._running:
                    if self._signal and not told:  # a signal handler must not print
                        names = "; ".join(run.name for run, *_ in self._running.values())
                        self._reporter.notice(f"stopping when these have saved: {names}")
                        told = True
                    for slot in range(len(self._slots)):
                        if waiting and slot not in self._running and not self._signal:
                            self._start(slot, waiting.popleft())
                    for run, code in self._ended(bar):
                        if code == EXIT_MISTAKE:
                            self._send(signal.SIGTERM)  # the others save their state
                            for _, process, _ in self._running.values():
                                process.wait()
                            raise UserError(f"{run.name}: {_last_line(run.log)}")
                        failed += [run] * (code != 0)
                    time.sleep(POLL_S)
        finally:
            self._send(signal.SIGKILL)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self._signal:
            self._reporter.notice("stopped; the same command goes on")
            return EXIT_PREEMPTED
        for run in failed:
            self._reporter.notice(f"failed: {run.name}: {_last_line(run.log)}; see {run.log}")
        return EXIT_FAILED if failed else 0

    def _start(self, slot: int, run: Planned) -> None:
        run.workdir.parent.mkdir(parents=True, exist_ok=True)
        die = functools.partial(die_with_parent, os.getpid(), signal.SIGTERM)
        # The log of a run that was removed would say that this one is done.
        with run.log.open("ab" if run.workdir.exists() else "wb") as log:
            process = subprocess.Popen(
                [*self._command, *self._slots[slot], *run.flags()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the SIGINT of Ctrl-C comes from here, once
                preexec_fn=die if sys.platform == "linux" else None,
            )
        self._running[slot] = run, process, time.monotonic()
        if self._signal:  # it arrived while the process was being started
            self._send(signal.SIGTERM)

    def _ended(self, bar: Bar) -> Iterator[tuple[Planned, int]]:
        """The runs that have ended, with their exit codes."""
        for slot, (run, process, began) in list(self._running.items()):
            if (code := process.poll()) is None:
                bar.status(f"{run.name}: {_last_line(run.log)}")
                continue
            del self._running[slot]
            if not code:
                bar.advance()
                self._reporter.line(f"done: {run.name}, in {duration(time.monotonic() - began)}")
            if not self._signal or not code:
                yield run, code

    def _end(self, number: int, _frame: object) -> None:
        if self._signal == number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = self._signal or number
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        for _, process, _ in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def _last_line(file: pathlib.Path) -> str:
    """The last line that a run has printed; "" if none."""
    with contextlib.suppress(OSError):
        with file.open("rb") as log:  # read several times a second, and it may be large
            log.seek(max(log.seek(0, os.SEEK_END) - 4000, 0))
            lines = log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""


def summarize(planned: Sequence[Planned], output: pathlib.Path, reporter: Reporter) -> None:
    """Prints the table, and writes sweep.csv, sweep.png and report.html; UserError without data."""
    logs = {run: read_rows(run.workdir / "metrics.jsonl") for run in planned}
    logs = {run: rows for run, rows in logs.items() if rows}
    key = over_seeds.compared_key(list(logs.values()))
    if not key:
        raise UserError(f"the runs in {output} have logged nothing that all of them have.")
    by_variant: dict[Variant, dict[int, over_seeds.Rows]] = {run.variant: {} for run in planned}
    for run, rows in logs.items():
        by_variant[run.variant][run.seed] = rows
    first, *_ = by_variant
    by_variant = {variant: rows for variant, rows in by_variant.items() if rows}
    if first not in by_variant:
        reporter.notice(
            f"{first.name} has logged nothing; differences are from {next(iter(by_variant)).name}"
        )
    unfinished = [run.name for run in logs if run.num_steps is not None and not run.is_finished]
    if unfinished:
        reporter.notice(f"not finished, so with their last values so far: {'; '.join(unfinished)}")
    found = [over_seeds.compared(one.name, rows, key) for one, rows in by_variant.items()]
    reporter.table(over_seeds.results_table(key, found))
    over_seeds.write_csv(output / "sweep.csv", key, found)
    with replacing(output / "sweep.png") as out:
        over_seeds.draw(key, found).savefig(out, format="png", dpi=110)
    write_page(output / "report.html", [run.workdir for run in logs])
    places = {"report": "report.html", "picture": "sweep.png", "figures": "sweep.csv"}
    places = {name: short_path(output / file) for name, file in places.items()}
    reporter.ending(f"{len(logs)} of {len(planned)} runs", places)
