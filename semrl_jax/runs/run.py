"""Records the steps of a run: checkpoints, rows of the log, responses, the report."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import pathlib
import platform
import time
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections
import numpy as np

from semrl_jax import data
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.environments.journal import Journal
from semrl_jax.pages.report import write_report
from semrl_jax.runs.checkpoints import Checkpoints
from semrl_jax.runs.mismatch_budget import mismatch_warning
from semrl_jax.runs.records import (
    MetricWriter,
    keep_damaged_log,
    record_of,
    remove_rollouts,
    write_rollouts,
)
from semrl_jax.runs.trackers import open_trackers
from semrl_jax.runs.workdir import Workdir
from semrl_jax.sampling.recorded import RECORDS, file_of, write_record
from semrl_jax.sampling.scoring import num_sampled_tokens
from semrl_jax.support.chips import peak_flops
from semrl_jax.support.console import Bar, Reporter, evaluation_line, summary_line
from semrl_jax.support.cores import usable_cores
from semrl_jax.support.rows import STARTS, append_start
from semrl_jax.support.safe_files import replacing
from semrl_jax.training.loop import StepResult
from semrl_jax.training.train_state import TrainState


@dataclasses.dataclass
class Run:
    """The directory and the console output of a run. Only process 0 writes rows and the report."""

    config: ml_collections.ConfigDict
    workdir: Workdir
    checkpoints: Checkpoints
    tokenizer: Any
    reporter: Reporter
    stop: StopRequest
    leads: bool  # process 0
    answers: Journal | None = None  # of environments
    _writer: MetricWriter | None = None
    _told_size: bool = False  # of a record for replays
    _warned: set[str] = dataclasses.field(default_factory=set)  # of what
    _next_report: float = 0.0  # in `time.monotonic()`; before, none is drawn between steps

    def begin_rows(self, first_step: int) -> None:
        """Opens the log; removes what an earlier attempt recorded from `first_step` on."""
        if self.leads:
            remove_rollouts(self.workdir.path / "rollouts", first_step)
            path, run_id, warn = self.workdir.path, self.workdir.run_id, self.reporter.notice
            keep_damaged_log(path, warn)
            trackers = open_trackers(self.config, path, run_id, warn)
            is_first = not (path / STARTS).exists()
            remove_rollouts(self.workdir.path / RECORDS, first_step)
            self._writer = MetricWriter(path, first_step, trackers, is_first=is_first)
            append_start(path, self._start(first_step))

    def end_rows(self) -> None:
        """Closes the log."""
        if self._writer is not None:
            self._writer.close()

    def write_row(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends a row to the log, after `begin_rows`."""
        if self._writer is not None:
            self._writer.write(step, scalars)

    def _warn(self, result: StepResult, scalars: Mapping[str, float]) -> None:
        """Says each problem once: the log and the report have the later steps."""
        if "mismatch" not in self._warned:
            self._warn_of("mismatch", mismatch_warning(self.config, scalars, self.workdir.path))
        errors = list(filter(None, (item.verdict.error for item in result.scored)))
        if 2 * len(errors) >= len(result.scored):
            self._warn_of(
                "failures",
                f"warning: {len(errors)} of {len(result.scored)} responses have no verdict, such "
                f"as {errors[0]!r:.300}; see `verifier_error` in rollouts/",
            )
        if scalars.get("rollout/branches/fraction") == 0:
            self._warn_of(
                "branches",
                f"warning: rollout.branching={self.config.rollout.branching!r} found no token at "
                "which a response may branch; for a tokenizer of characters, set min_characters=1",
            )

    def _warn_of(self, what: str, warning: str | None) -> None:
        if warning and what not in self._warned:
            self._warned.add(what)
            self.reporter.notice(warning)

    def record(self, result: StepResult, bar: Bar) -> dict[str, float]:
        """Writes the row and, if due, the responses; prints one line each; returns the row."""
        if self._writer is None:
            return {}
        step, clock, evaluation = result.step, result.clock, result.evaluation
        num_steps = self.config.training.num_steps
        every = self.config.logging.rollouts_every_steps
        scalars = {}
        if evaluation is not None:
            scalars |= evaluation.scalars
            if every:
                self._write_rollouts(result, evaluation.scored, evaluation.benchmarks)
        if result.scored:
            if every and (step % every == 0 or step + 1 == num_steps):
                self._write_rollouts(result, result.scored)
            scalars |= result.scalars | _rates(result)
            if result.trace is not None:
                self._write_record(result)
            self._warn(result, scalars)
        scalars |= clock.scalars()
        self._writer.write(step, scalars)
        if evaluation is not None:
            self.reporter.line(evaluation_line(step, evaluation.scalars))
        if result.scored:
            bar.advance()
            bar.line(summary_line(step + 1, num_steps, scalars, bar.left_s()))
        return scalars

    def keep(self, state: TrainState) -> None:
        """Saves the state and draws the report if they are due."""
        step = int(state.step)
        if self.checkpoints.due(step, self.config.training.num_steps):
            self.checkpoints.save(state)
        if self.answers is not None:
            lag = self.config.rollout.max_staleness  # weights may be this much older than a batch
            self.answers.forget(step - lag, self.checkpoints.sealed - lag)
        every = self.config.logging.plot_every_steps
        if every and step % every == 0 and time.monotonic() >= self._next_report:
            began = time.monotonic()
            self.draw_report()
            # It reads the whole log, so it takes longer and longer: at most a tenth of the time.
            self._next_report = time.monotonic() + 9 * (time.monotonic() - began)

    def draw_report(self) -> None:
        """Draws the report. If that fails, it prints one line, and the run continues."""
        if not self.leads:
            return
        try:
            write_report(self.workdir.path)
        except Exception as error:
            self.reporter.notice(f"no report: {type(error).__name__}: {error}")

    def keep_minibatch(self, arrays: Mapping[str, np.ndarray]) -> pathlib.Path:
        """Saves the arrays of a mini-batch whose update failed; returns the file."""
        file = self.workdir.path / "nonfinite_batch.npz"
        if self.leads:
            with replacing(file) as out:
                np.savez(out, **arrays)
        return file

    def _start(self, first_step: int) -> dict[str, Any]:
        """What `starts.jsonl` says about this attempt: when, on what, with which changes."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return {
            "step": first_step,
            "time": now,
            "attempt_id": self.workdir.attempt_id,
            "changed": list(self.workdir.changed),
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "processes": jax.process_count(),
            "cores": usable_cores(),
            "system": platform.platform(),
            "python": platform.python_version(),
        }

    def _write_rollouts(self, result: StepResult, scored, benchmarks=None) -> None:
        text = functools.partial(data.full_text, self.tokenizer)
        directory = self.workdir.path / "rollouts"
        with result.clock("write_rollouts"):
            write_rollouts(directory, result.step, scored, text, benchmarks)

    def _write_record(self, result: StepResult) -> None:
        with result.clock("write_rollouts"):
            file = file_of(self.workdir.path, result.step)
            size = write_record(file, record_of(result))
        if not self._told_size:
            self._told_size = True
            self.reporter.line(f"recorded step {result.step} for replays: {size / 2**20:.2f} MiB")


def _rates(result: StepResult) -> dict[str, float]:
    num_tokens = sum(item.rollout.num_policy_tokens for item in result.scored)
    sampled = num_sampled_tokens(result.scored)
    num_sampled = result.scalars.get("rollout/num_sampled_tokens", sampled)
    seconds = result.clock.seconds
    trained_s = sum(map(seconds, ("old_logprobs", "ref_logprobs", "values", "update")))
    peak = peak_flops(jax.devices()[0].device_kind)
    utilization = {}
    if peak is not None:
        available = trained_s * jax.device_count() * peak
        utilization["policy/mfu"] = result.scalars["policy/flops"] / available
    return utilization | {
        # Rate of the replicas. If they sample during an update, the trainer waits for less time.
        "rollout/tokens_per_s": num_sampled
        / result.scalars.get("time/sample_ahead_s", seconds("sample")),
        "policy/tokens_per_s": num_tokens / trained_s,
        "response/num_tokens": float(num_tokens),
    }
