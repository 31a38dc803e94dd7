"""The train loop: `run_steps` is the algorithm, one room's verb a line; `train` is its frame."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping

import ml_collections

from semrl_jax import compilation, data
from semrl_jax.cluster import find_place, join, leave_alone
from semrl_jax.cluster.agreement import is_agreed, together
from semrl_jax.cluster.connecting import connect
from semrl_jax.cluster.peers import Peers
from semrl_jax.errors import Preempted, UserError
from semrl_jax.training.advantages import (
    corrected_advantages,
    group_rewards,
    next_baselines,
    shaped_advantages,
)
from semrl_jax.training.clock import Clock
from semrl_jax.training.config import validate
from semrl_jax.training.console import Bar, Reporter, evaluation_line, summary_line
from semrl_jax.training.opening import open_run
from semrl_jax.training.policy_setup import build_policy, starting_directory
from semrl_jax.training.report import write_report
from semrl_jax.training.run import Run
from semrl_jax.training.sameness import check_same
from semrl_jax.training.scoring import ScoredRollout
from semrl_jax.training.signals import StopRequest
from semrl_jax.training.state import DataPosition, TrainState
from semrl_jax.training.statistics import batch_scalars, metric_arrays
from semrl_jax.training.workdir import open_workdir, open_workdir_together
from semrl_jax.training.writer import MetricWriter, remove_rollouts, write_rollouts

EXIT_NOT_SAVED = EXIT_FAILED = 1
EXIT_MISTAKE = 2
EXIT_PREEMPTED = 75


def run_steps(
    run: Run, state: TrainState, writer: MetricWriter | None, bar: Bar
) -> Iterator[TrainState]:
    """GRPO with VERL shaping; yields the state after every step.

    Row s of the log belongs to the weights that step s samples with: its evaluation comes before
    its update, and the last row holds the evaluation of the trained weights alone.
    """
    config = run.config
    for step in range(int(state.step), config.training.num_steps):
        clock = Clock(bar.status)
        with clock("sync_weights"):
            version = run.sync_weights(state.params, step)
        evaluation = run.evaluate(state.params, version, step, clock, bar)
        prompts, position = data.next_prompts(
            run.prompts, config.seed, state.position, config.data.prompts_per_step
        )
        scored = run.sample(prompts, state.params, version, step, clock, bar)
        rewards = group_rewards(scored, config, step)
        batch = run.padded(scored)
        with clock("old_logprobs"):
            old = run.logprobs(
                state.params,
                batch,
                with_states=run.needs_policy_states(step),
                with_entropies=bool(run.token_indicators),
            )
        with clock("ref_logprobs"):
            ref_logprobs = run.ref_logprobs(batch)
        mismatch = run.mismatch(scored, old, step)
        with clock("metrics"):
            scored = run.measured(scored, batch, old)
            metrics = metric_arrays(scored)
        over_batch = run.measure_batch(scored)
        with clock("advantages"):
            shaped, report = shaped_advantages(
                rewards, metrics, batch.response_mask, state.shaping, config
            )
            corrected, weights = corrected_advantages(shaped, old.logprobs, batch, config)
            shaping = next_baselines(state.shaping, metrics, rewards, config)
        # The last moment at which the state before this step still exists.
        together(run.peers, "advantages", run.stop.check)
        with clock("update"):
            state, losses = run.update(state, batch, old.logprobs, ref_logprobs, corrected)
        state = state._replace(
            shaping=shaping, position=DataPosition(*position), step=state.step + 1
        )
        statistics = batch_scalars(scored, rewards) | {
            f"metrics/{name}": value for name, value in over_batch.result().items()
        }
        record_step(
            run,
            writer,
            bar,
            step,
            clock,
            scored,
            statistics | mismatch | report | weights | losses,
            evaluation,
        )
        yield state
    bar.status("last evaluation")
    clock = Clock(bar.status)
    step = config.training.num_steps
    if run.evaluates(step):
        version = run.sync_weights(state.params, step)
        evaluation = run.evaluate(state.params, version, step, clock, bar)
        if writer is not None:
            writer.write(step, evaluation | clock.scalars())
        run.reporter.line(evaluation_line(step, evaluation))


def join_others(
    config: ml_collections.ConfigDict, environ: Mapping[str, str]
) -> tuple[Peers, Reporter]:
    """The processes of this job.

    Raises:
      UserError: if they cannot be reached, or would give each other up while one still samples.
    """
    settings = config.distributed
    place = find_place(settings, environ)
    call_timeout_s = config.rollout.call_timeout_s
    if place.num_processes > 1 and settings.phase_timeout_s <= call_timeout_s:
        raise UserError(
            f"distributed.phase_timeout_s={settings.phase_timeout_s:g} must be above "
            f"rollout.call_timeout_s={call_timeout_s:g}: for so long a process may sample while "
            "the others wait; raise the one or lower the other."
        )
    reporter = Reporter(quiet=place.process_id > 0)
    # JAX's own heartbeat aborts without a name: it comes after ours.
    join(
        place,
        connect_timeout_s=settings.connect_timeout_s,
        heartbeat_timeout_s=3 * settings.heartbeat_timeout_s,
        announce=reporter.line,
    )
    try:
        peers = connect(
            place.coordinator,
            connect_timeout_s=settings.connect_timeout_s,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            phase_timeout_s=settings.phase_timeout_s,
            progress=reporter.line,
        )
    except UserError:
        leave_alone(EXIT_MISTAKE)
        raise
    return peers, reporter


def warm_start(config: ml_collections.ConfigDict, workdir: str) -> int:
    """Makes the warm start of a run directory, if it is not there yet; returns as `train`."""
    validate(config)
    place = find_place(config.distributed, os.environ)
    if place.num_processes > 1:
        raise UserError(
            f"distributed: process {place.process_id} of {place.num_processes} (from "
            f"{place.source}), but a warm start is made by one process; start one alone with "
            "--config.distributed.num_processes=1. launch.train needs none before it."
        )
    reporter = Reporter()
    stop = StopRequest(config.training.grace_s, EXIT_PREEMPTED)
    directory = open_workdir(workdir, config)
    try:
        with stop.installed(), stop.interruptible(), compilation.watching(reporter.line):
            policy, tokenizer = build_policy(config)
            starting_directory(config, policy, tokenizer, directory.warm_start, reporter)
    except UserError as error:
        directory.discard(str(error))
        raise
    except Preempted as preempted:
        reporter.line(f"{preempted}: stopped; the same command starts again")
        return EXIT_PREEMPTED
    finally:
        directory.close()
    reporter.line(f"done: {directory.warm_start} is a Hugging Face model directory")
    return 0


def train(config: ml_collections.ConfigDict, workdir: str) -> int:
    """Trains, or resumes what the directory holds.

    Returns:
      0 when done, 75 when a signal ended the run after a checkpoint, 1 if the disk refused the last
      checkpoint.

    Raises:
      UserError: for a wrong setting, directory, address or token, before anything is trained.
      RuntimeError: if the updates stay non-finite, or no replica can sample.
    """
    validate(config)
    peers, reporter = join_others(config, os.environ)
    try:
        check_same(peers, config)
        code = _train_together(config, workdir, peers, reporter)
        peers.gather("end", code)
        return code
    except BaseException as error:
        if not is_agreed(error):
            code = EXIT_MISTAKE if isinstance(error, UserError) else EXIT_FAILED
            peers.fail(str(error) or type(error).__name__, code)
            if peers.count > 1:
                leave_alone(code)
        raise
    finally:
        peers.close()


def _train_together(
    config: ml_collections.ConfigDict, workdir: str, peers: Peers, reporter: Reporter
) -> int:
    stop = StopRequest(config.training.grace_s, EXIT_PREEMPTED, forward=peers.stop_all)
    peers.on_stop = stop.request
    directory = open_workdir_together(peers, workdir, config)
    run = None
    try:
        with stop.installed(), contextlib.ExitStack() as stack:
            stack.enter_context(compilation.watching(reporter.line))
            run = stack.enter_context(open_run(config, directory, reporter, stop, peers))
            return _train(run)
    except (Exception, Preempted) as error:
        # Once it is open, replicas may know the run by its id: what is no mistake goes on with it.
        if peers.index == 0 and (run is None or isinstance(error, UserError)):
            directory.discard(str(error))
        if not isinstance(error, Preempted):
            raise
        # Before the first step there is nothing to save.
        reporter.line(f"{error}: stopped before training began; the same command starts again")
        return EXIT_PREEMPTED
    finally:
        directory.close()


def _train(run: Run) -> int:
    config, directory, reporter = run.config, run.workdir, run.reporter
    state = run.first_state()
    if int(state.step):
        reporter.line(f"resumed {directory.path} at step {int(state.step)}")
    for change in directory.changed:
        reporter.line(f"setting changed since the run began: {change}")
    first_step = int(state.step)
    if first_step > config.training.num_steps:
        raise UserError(
            f"training.num_steps={config.training.num_steps} is less than the {first_step} steps "
            f"{directory.path} has behind it; raise it or name a new workdir."
        )
    if run.leads:
        remove_rollouts(directory.rollouts, first_step)
    writer = MetricWriter(directory.path, first_step) if run.leads else None
    num_steps = config.training.num_steps
    run.counters()  # what opening the run took is no step's
    try:
        with reporter.bar("train", num_steps, "steps", done=first_step) as bar:
            for finished in run_steps(run, state, writer, bar):
                state = finished
                step = int(state.step)
                if run.checkpoints.due(step, num_steps):
                    run.checkpoints.save(state)
                every = config.logging.plot_every_steps
                if every and step % every == 0:
                    draw_report(run)
    except Preempted as preempted:
        started = time.monotonic()
        reporter.line(f"{preempted}: saving a checkpoint of step {int(state.step)}")
        run.checkpoints.save(state)
        failure = run.checkpoints.failure()
        if not failure:
            run.stop.checkpoint_saved()
            reporter.line(
                f"{preempted}: saved in {time.monotonic() - started:.1f} s; the same command "
                "resumes"
            )
        draw_report(run)
        if failure:
            reporter.line(f"{preempted}: {failure}; make room, the same command goes on")
            return EXIT_NOT_SAVED
        return EXIT_PREEMPTED
    except Exception:
        draw_report(run)
        raise
    finally:
        if writer is not None:
            writer.close()
    failure = run.checkpoints.failure()
    draw_report(run)
    if failure:
        reporter.line(f"not done: {failure}; make room, the same command goes on")
        return EXIT_NOT_SAVED
    reporter.line(f"done: {num_steps} steps; see {directory.path / 'report.html'}")
    return 0


def draw_report(run: Run) -> None:
    """Draws the report; that it cannot be drawn is said, and changes nothing of how a run ends."""
    if not run.leads:
        return
    try:
        write_report(run.workdir.path)
    except Exception as error:
        run.reporter.line(f"no report: {type(error).__name__}: {error}")


def record_step(
    run: Run,
    writer: MetricWriter | None,
    bar: Bar,
    step: int,
    clock: Clock,
    scored: list[ScoredRollout],
    scalars: dict[str, float],
    evaluation: dict[str, float],
) -> None:
    """Writes the row, the sampled responses where due, and what a person sees."""
    counters = run.counters()
    if writer is None:
        return
    num_steps = run.config.training.num_steps
    every = run.config.logging.rollouts_every_steps
    if every and (step % every == 0 or step + 1 == num_steps):
        with clock("write_rollouts"):
            write_rollouts(run.workdir.rollouts, step, scored, run.full_text)
    num_tokens = sum(item.rollout.num_policy_tokens for item in scored)
    trained_s = sum(clock.seconds(phase) for phase in ("old_logprobs", "ref_logprobs", "update"))
    scalars |= {
        "rollout/tokens_per_s": num_tokens / clock.seconds("sample"),
        "rollout/staleness": 0.0,
        "policy/tokens_per_s": num_tokens / trained_s,
        "response/num_tokens": float(num_tokens),
    }
    scalars |= counters | clock.scalars() | evaluation
    writer.write(step, scalars)
    bar.advance()
    if evaluation:
        run.reporter.line(evaluation_line(step, evaluation))
    run.reporter.line(summary_line(step + 1, num_steps, scalars, bar.left_s()))
