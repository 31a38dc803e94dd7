"""What a run keeps of its steps: checkpoints, rows, responses, the report."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import ml_collections
import numpy as np

from semrl_jax import data
from semrl_jax.clock import Clock
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.console import Bar, Reporter, evaluation_line, summary_line
from semrl_jax.files import replacing
from semrl_jax.runs.checkpoints import Checkpoints
from semrl_jax.runs.records import MetricWriter, remove_rollouts, write_rollouts
from semrl_jax.runs.report import write_report
from semrl_jax.runs.workdir import Workdir
from semrl_jax.training.loop import StepResult
from semrl_jax.training.state import TrainState


@dataclasses.dataclass
class Run:
    """The directory of a run, and what is said while it goes on. Process 0 alone writes rows."""

    config: ml_collections.ConfigDict
    workdir: Workdir
    checkpoints: Checkpoints
    tokenizer: Any
    reporter: Reporter
    stop: StopRequest
    leads: bool  # process 0
    _writer: MetricWriter | None = None

    def begin_rows(self, first_step: int) -> None:
        """Opens the log; removes what an earlier attempt has recorded from `first_step` on."""
        if self.leads:
            remove_rollouts(self.workdir.rollouts, first_step)
            self._writer = MetricWriter(self.workdir.path, first_step)

    def end_rows(self) -> None:
        """Closes the log."""
        if self._writer is not None:
            self._writer.close()

    def record(self, result: StepResult, bar: Bar) -> None:
        """Writes the row, the responses where due, and what a person sees."""
        if self._writer is None:
            return
        step, clock, evaluation = result.step, result.clock, result.evaluation
        if evaluation is not None and self.config.logging.rollouts_every_steps:
            with clock("write_rollouts"):
                self._write_rollouts(step, evaluation.scored, evaluation.benchmarks)
        if not result.scored:
            self._writer.write(step, evaluation.scalars | clock.scalars())
            self.reporter.line(evaluation_line(step, evaluation.scalars))
            return
        num_steps = self.config.training.num_steps
        every = self.config.logging.rollouts_every_steps
        if every and (step % every == 0 or step + 1 == num_steps):
            with clock("write_rollouts"):
                self._write_rollouts(step, result.scored)
        scalars = result.scalars | _rates(result) | clock.scalars()
        if evaluation is not None:
            scalars |= evaluation.scalars
        self._writer.write(step, scalars)
        bar.advance()
        if evaluation is not None:
            self.reporter.line(evaluation_line(step, evaluation.scalars))
        self.reporter.line(summary_line(step + 1, num_steps, scalars, bar.left_s()))

    def keep(self, state: TrainState) -> None:
        """Saves the state and draws the report where they are due."""
        step = int(state.step)
        if self.checkpoints.due(step, self.config.training.num_steps):
            self.checkpoints.save(state)
        every = self.config.logging.plot_every_steps
        if every and step % every == 0:
            self.draw_report()

    def draw_report(self) -> None:
        """Draws the report. A report that cannot be drawn is one line, and changes nothing else."""
        if not self.leads:
            return
        try:
            write_report(self.workdir.path)
        except Exception as error:
            self.reporter.line(f"no report: {type(error).__name__}: {error}")

    def keep_minibatch(self, arrays: Any) -> pathlib.Path:
        """Saves the arrays of a mini-batch whose update failed; returns the file."""
        file = self.workdir.path / "nonfinite_batch.npz"
        if self.leads:
            leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
            named = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
            with replacing(file) as out:
                np.savez(out, **named)
        return file

    def _write_rollouts(self, step: int, scored, benchmarks=None) -> None:
        def text(token_ids: np.ndarray) -> str:
            return data.full_text(self.tokenizer, token_ids)

        write_rollouts(self.workdir.rollouts, step, scored, text, benchmarks)


def _rates(result: StepResult) -> dict[str, float]:
    num_tokens = sum(item.rollout.num_policy_tokens for item in result.scored)
    clock: Clock = result.clock
    trained_s = sum(clock.seconds(phase) for phase in ("old_logprobs", "ref_logprobs", "update"))
    return {
        "rollout/tokens_per_s": num_tokens / clock.seconds("sample"),
        "rollout/staleness": 0.0,
        "policy/tokens_per_s": num_tokens / trained_s,
        "response/num_tokens": float(num_tokens),
    }
