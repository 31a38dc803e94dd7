"""Runs training from start to exit code: joins the processes, opens the run, trains, closes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import ml_collections

from semrl_jax.cluster import exit_without_peers, find_place, join
from semrl_jax.cluster.agreement import is_agreed
from semrl_jax.cluster.connecting import connect
from semrl_jax.cluster.peers import Peers
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.models.of_config import build_policy
from semrl_jax.runs.checkpoint_files import checkpoint_steps
from semrl_jax.runs.config_checks import validate
from semrl_jax.runs.consistency import check_same
from semrl_jax.runs.export import ADAPTER, MODEL, save_trained
from semrl_jax.runs.run import Run
from semrl_jax.runs.setup import OpenRun, open_run
from semrl_jax.runs.starting_model import starting_directory, with_own_model
from semrl_jax.runs.trackers import check_trackers
from semrl_jax.runs.workdir import open_workdir, open_workdir_together
from semrl_jax.sampling.selecting import TooFewGroups
from semrl_jax.settings.profile import profiled_steps
from semrl_jax.support import compilation
from semrl_jax.support.clock import Clock
from semrl_jax.support.console import Reporter, short_path
from semrl_jax.support.errors import Preempted, UserError
from semrl_jax.training.loop import StepResult, run_steps
from semrl_jax.training.train_state import POLICY, TrainState
from semrl_jax.training.trainee import NonFiniteUpdates

Opened = TypeVar("Opened")
# Yields what each step leaves, and returns the exit code.
Work = Generator[Any, None, int]

DONE = "done: {} steps"  # a finished run prints it, and no other one
EXIT_NOT_SAVED = EXIT_FAILED = 1
EXIT_MISTAKE = 2
EXIT_PREEMPTED = 75


def join_others(
    config: ml_collections.ConfigDict, environ: Mapping[str, str], quiet: bool = False
) -> tuple[Peers, Reporter]:
    """The processes of this job, and a reporter that prints only in process 0; or UserError."""
    settings = config.distributed
    place = find_place(settings, environ)
    call_timeout_s = config.rollout.call_timeout_s
    if place.num_processes > 1 and settings.phase_timeout_s <= call_timeout_s:
        raise UserError(
            f"distributed.phase_timeout_s={settings.phase_timeout_s:g} must be above rollout."
            f"call_timeout_s={call_timeout_s:g}: the others wait while one process samples."
        )
    reporter = Reporter(silent=place.process_id > 0, quiet=quiet)
    # JAX aborts without naming the lost process, so its timeout is longer than ours.
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
        exit_without_peers(EXIT_MISTAKE)
        raise
    return peers, reporter


def warm_start(config: ml_collections.ConfigDict, workdir: str, quiet: bool = False) -> int:
    """Makes the warm start of a run directory, unless it exists; returns 0, or 75 as `train`."""
    validate(config)
    place = find_place(config.distributed, os.environ)
    if place.num_processes > 1:
        raise UserError(
            f"distributed: one process makes a warm start, this is {place.process_id} of "
            f"{place.num_processes} (from {place.source}); set distributed.num_processes=1."
        )
    reporter, stopped = Reporter(quiet=quiet), "stopped; the same command starts again"
    stop = StopRequest(config.training.grace_s, EXIT_PREEMPTED, late=stopped)
    directory = open_workdir(workdir, config)
    try:
        with stop.installed(), stop.interruptible(), compilation.watching(reporter.line):
            policy, tokenizer = build_policy(config)
            start = directory.path / "warm_start"
            starting_directory(config, policy, tokenizer, start, reporter)
    except UserError as error:
        directory.discard(str(error))
        raise
    except Preempted as preempted:
        reporter.notice(f"{preempted}: {stopped}")
        return EXIT_PREEMPTED
    finally:
        directory.close()
    reporter.notice(f"done: {start} is a Hugging Face model directory")
    return 0


def train(config: ml_collections.ConfigDict, workdir: str, quiet: bool = False) -> int:
    """Starts a run, or resumes the run in the directory.

    Returns 0 when done, 75 after a signal and a checkpoint, 1 if the last checkpoint could not be
    written to disk. UserError for a wrong setting, directory, address or token, before any
    training; RuntimeError if the updates stay non-finite, or no replica can sample.
    """
    return exit_code(train_steps(config, workdir, quiet))


def train_steps(
    config: ml_collections.ConfigDict, workdir: str, quiet: bool = False
) -> Generator[tuple[StepResult, dict[str, float]], None, int]:
    """Trains as `train` does; yields every recorded step and its row. Closing it ends the run."""
    return (yield from start(config, workdir, open_run, _train, quiet))


def exit_code(work: Work) -> int:
    """Works to the end."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def start(
    config: ml_collections.ConfigDict,
    workdir: str,
    open_: Callable[..., AbstractContextManager[Opened]],
    work: Callable[[ml_collections.ConfigDict, Opened], Work],
    quiet: bool = False,
) -> Work:
    """Joins the processes, opens directory and run (`open_`), and works with these; see `train`."""
    validate(config)
    check_trackers(config.logging)
    peers, reporter = join_others(config, os.environ, quiet)
    try:
        check_same(peers, config)
        code = yield from _work_together(config, workdir, peers, reporter, open_, work)
        peers.gather("end", code)
        return code
    except BaseException as error:
        if not is_agreed(error):
            code = EXIT_MISTAKE if isinstance(error, UserError) else EXIT_FAILED
            peers.fail(str(error) or type(error).__name__, code)
            if peers.count > 1:
                exit_without_peers(code)
        raise
    finally:
        peers.close()


def _work_together(
    config: ml_collections.ConfigDict,
    workdir: str,
    peers: Peers,
    reporter: Reporter,
    open_: Callable[..., AbstractContextManager[Opened]],
    work: Callable[[ml_collections.ConfigDict, Opened], Work],
) -> Work:
    stop = StopRequest(config.training.grace_s, EXIT_PREEMPTED, forward=peers.stop_all)
    peers.on_stop = stop.request
    directory = open_workdir_together(peers, workdir, config, reporter.notice)
    opened = None
    try:
        with stop.installed(), contextlib.ExitStack() as stack:
            stack.enter_context(compilation.watching(reporter.line))
            own = with_own_model(config, directory.path, peers, reporter)
            opened = stack.enter_context(open_(own, directory, reporter, stop, peers))
            return (yield from work(own, opened))
    except (Exception, Preempted) as error:
        # The replicas of an open run know its id. Keep the id unless this was a user mistake.
        if peers.index == 0 and (opened is None or isinstance(error, UserError)):
            directory.discard(str(error))
        if not isinstance(error, Preempted):
            raise
        reporter.notice(f"{error}: stopped before training began; the same command starts again")
        return EXIT_PREEMPTED
    finally:
        directory.close()


def _train(
    config: ml_collections.ConfigDict, opened: OpenRun
) -> Generator[tuple[StepResult, dict[str, float]], None, int]:
    run, reporter, directory = opened.run, opened.run.reporter, opened.run.workdir
    state = opened.first_state()
    first_step, num_steps = int(state.step), config.training.num_steps
    announce(run, first_step)
    if first_step > num_steps:
        given = f"num_steps={num_steps}"
        if epochs := config.training.num_epochs:
            given = f"num_epochs={epochs} gives {num_steps} steps, which"
        raise UserError(f"training.{given} is less than the {first_step} finished; raise it.")
    run.begin_rows(first_step)
    try:
        with reporter.bar("train", num_steps, "steps", done=first_step) as bar:
            results = run_steps(opened.parts, state, bar.status)
            if run.leads:
                steps = profiled_steps(config.profile)
                results = profiled(results, first_step, steps, directory.path / "profile")
            for result in results:
                row = run.record(result, bar)
                if result.scored:
                    state = result.state
                    run.keep(state)
                yield result, row
    except Preempted as preempted:
        return end_early(run, state, preempted)
    except GeneratorExit:
        end_early(run, state, Preempted("stopped"))
        raise
    except TooFewGroups:
        if int(state.step) > first_step:  # other settings can continue from the last step
            run.checkpoints.save(state)
            found = run.checkpoints.failure() or f"saved a checkpoint of step {int(state.step)}"
            reporter.notice(f"too few groups: {found}; more rounds continue from it")
        run.draw_report()
        raise
    except NonFiniteUpdates as error:
        file = run.keep_minibatch(error.minibatch.named())
        run.draw_report()
        sections = ("training" if model == POLICY else model for model in error.models)
        rates = " and ".join(f"{section}.learning_rate" for section in sections)
        raise RuntimeError(
            f"{error} ({' and '.join(error.models)}); the last mini-batch is in {file}. Lower "
            f"{rates}, or continue from an earlier checkpoint (training.resume_from)."
        ) from None
    except Exception:
        run.draw_report()
        raise
    finally:
        run.end_rows()
    failure = run.checkpoints.failure()
    run.draw_report()
    if failure:
        reporter.notice(f"not done: {failure}; make room, the same command goes on")
        return EXIT_NOT_SAVED
    if run.answers is not None:
        run.answers.end()
    if dtype := config.training.export:
        if config.rollout.in_turns:  # the export brings all parameters to the devices
            opened.evaluator.sampler.release_weights(Clock())
        learner, start = opened.learner, opened.start
        architecture = learner.policy.config
        save_trained(run, state.params, learner.base, architecture, start, learner.peers, dtype)
    end(run, DONE.format(num_steps))
    return 0


def end(run: Run, line: str) -> None:
    """Prints where everything is, and what to try next."""
    path, folder = run.workdir.path, run.workdir.path / "checkpoints"
    steps = ", ".join(map(str, checkpoint_steps(folder))) if folder.is_dir() else ""
    places = {
        "report": short_path(path / "report.html"),
        "log": f"{short_path(path / 'metrics.jsonl')}; tensorboard --logdir={short_path(path)}",
        "responses": f"{short_path(path / 'rollouts')}/",
        "checkpoints": f"{short_path(folder)}/ (steps {steps})",
    }
    if not (path / "rollouts").is_dir():
        del places["responses"]
    if run.config.training.export:
        places["model"] = f"{short_path(path / MODEL)}/, for transformers, vLLM and model.path"
        if run.checkpoints.adapter:
            places["adapter"] = f"{short_path(path / ADAPTER)}/, for PEFT and lora.path"
    policy, name = f"--policy={short_path(path)}", run.config.environment.name
    commands = [
        ["launch.chat", policy, *([f"--environment={name}"] if name else [])],
        ["launch.evaluate", policy, f"--output={short_path(path)}-evaluation"],
        ["launch.report", short_path(path), "--serve"],
    ]
    run.reporter.ending(line, places, commands)


def announce(run: Run, first_step: int) -> None:
    """Prints what a resumed run goes on from, and which settings have changed."""
    if first_step:
        run.reporter.notice(f"resumed {run.workdir.path} at step {first_step}")
    for change in run.workdir.changed:
        run.reporter.notice(f"setting changed since the run began: {change}")


def end_early(run: Run, state: TrainState, preempted: Preempted) -> int:
    """Saves the state of the last finished step; returns the exit code."""
    started = time.monotonic()
    run.reporter.notice(f"{preempted}: saving a checkpoint of step {int(state.step)}")
    run.checkpoints.save(state)
    failure = run.checkpoints.failure()
    if not failure:
        run.stop.checkpoint_saved()
        run.reporter.notice(
            f"{preempted}: saved in {time.monotonic() - started:.1f} s; the same command resumes"
        )
    run.draw_report()
    if failure:
        run.reporter.notice(f"{preempted}: {failure}; make room, the same command goes on")
        return EXIT_NOT_SAVED
    return EXIT_PREEMPTED


def profiled(
    results: Iterator[StepResult], first_step: int, steps: range, directory: pathlib.Path
) -> Iterator[StepResult]:
    """Takes the steps from `first_step` on, and records a JAX profile of those in `steps`.

    The profile has one marker per step and per phase. It is written to `plugins/profile/<time>/`
    when its last step ends, or when the training ends before that.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # calls of Python functions would be most of the file
    step = first_step
    with contextlib.ExitStack() as recording:
        while True:
            if step in (steps.start, first_step) and step in steps:
                jax.profiler.start_trace(
                    str(directory), create_perfetto_trace=True, profiler_options=options
                )
                recording.callback(jax.profiler.stop_trace)
            with jax.profiler.StepTraceAnnotation("step", step_num=step):
                result = next(results, None)
            step += 1
            if step not in steps:
                recording.close()  # before the caller records the result
            if result is None:
                return
            yield result
