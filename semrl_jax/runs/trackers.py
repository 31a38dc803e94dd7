"""Where the numbers of a run are shown while it goes on, such as TensorBoard or MLflow."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import ml_collections

from semrl_jax.settings.rules import flatten
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import jsonable

Scalars = Mapping[str, float | int]
Settings = Mapping[str, Any]  # hyperparameters by full name
FLUSH_S = 5.0  # between two flushes of TensorBoard's file, each of which waits for the disk


@runtime_checkable
class Tracker(Protocol):
    """Gets the rows of a run; `repeats`: also those of earlier starts, which it has lost."""

    repeats: bool

    def write(self, step: int, scalars: Scalars) -> None:
        """A row with finite values; steps never fall."""

    def close(self, final: Scalars) -> None:
        """Ends with the final figures, by name."""


class TensorBoard:
    """Event files in a directory, which are replaced: a file of events cannot be truncated.

    Rows are written in the calling thread. The thread of tensorboardX's SummaryWriter ends with its
    first error, such as a full disk, and the next rows would then wait for it for ever.
    """

    repeats = True

    def __init__(self, directory: pathlib.Path, settings: Settings):
        with _hidden("torch"):  # tensorboardX imports it for nothing, which takes 3 seconds
            from tensorboardX.event_file_writer import EventsWriter

        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(directory / "events"))
        self._settings = settings
        self._flushed = -math.inf  # in `time.monotonic()`

    def write(self, step: int, scalars: Scalars) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        # One event: a long run writes all its rows again when it is resumed.
        named = ((re.sub(r"[^-/\w.]", "_", name).lstrip("/"), x) for name, x in scalars.items())
        self._add(step, [Summary(value=[Summary.Value(tag=n, simple_value=x) for n, x in named])])

    def close(self, final: Scalars) -> None:
        from tensorboardX.summary import hparams

        if self._settings:
            plain = {name: _plain(value) for name, value in self._settings.items()}
            self._add(0, hparams(plain, dict.fromkeys(final)))
            self.write(0, final)
        self._writer.close()

    def _add(self, step: int, summaries: Sequence[Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event

        for summary in summaries:
            self._writer.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        if time.monotonic() - self._flushed > FLUSH_S:
            self._writer.flush()
            self._flushed = time.monotonic()


@contextlib.contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Lets an optional import of a module fail if nothing has imported it yet."""
    sys.modules.setdefault(module, None)
    try:
        yield
    finally:
        if sys.modules[module] is None:
            del sys.modules[module]


class WandB:
    """A run of Weights & Biases with the id of this run, so that a resumed run continues it."""

    repeats = False

    def __init__(self, project: str, workdir: pathlib.Path, run_id: str, settings: Settings):
        import wandb

        try:
            self._run = wandb.init(
                project=project,
                name=workdir.name,
                id=run_id,
                resume="allow",
                dir=workdir,
                config=dict(settings),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except (wandb.Error, ValueError) as error:
            reason = str(error).rstrip(".")
            raise UserError(
                f"logging.wandb={project!r}: {reason}; set WANDB_API_KEY, or WANDB_MODE=offline to "
                "send the run later with `wandb sync`."
            ) from None

    def write(self, step: int, scalars: Scalars) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self, final: Scalars) -> None:
        self._run.summary.update(dict(final))
        self._run.finish()


class Trackio:
    """A run of Trackio, which keeps its numbers on this machine."""

    repeats = False

    def __init__(self, project: str, workdir: pathlib.Path, run_id: str, settings: Settings):
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):  # advice in colours
            self._run = trackio.init(
                project=project,
                name=f"{workdir.name}-{run_id[:8]}",
                config={name: _plain(value) for name, value in settings.items()},
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self._last_step = 0

    def write(self, step: int, scalars: Scalars) -> None:
        self._run.log(dict(scalars), step=step)
        self._last_step = step

    def close(self, final: Scalars) -> None:
        if final:
            self._run.log(dict(final), step=self._last_step)
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()  # the run's own finish() would be called again at exit


class MLflow:
    """A run of MLflow with a tag of this run's id, so that a resumed run continues it.

    The server, or the local store, is that of MLFLOW_TRACKING_URI. A name of a figure has "_at_" in
    place of "@", as in verl: MLflow refuses other characters.
    """

    repeats = False

    def __init__(self, project: str, workdir: pathlib.Path, run_id: str, settings: Settings):
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        try:
            self._client = MlflowClient()
            experiment = self._client.get_experiment_by_name(project)
            number = experiment and experiment.experiment_id
            number = number or self._client.create_experiment(project)
            known = self._client.search_runs([number], f"tags.semrl_run = '{run_id}'")
            if known:
                self._run_id = known[0].info.run_id
                self._client.set_terminated(self._run_id, "RUNNING")
            else:
                tags = {"semrl_run": run_id}
                run = self._client.create_run(number, tags=tags, run_name=workdir.name)
                self._run_id = run.info.run_id
                params = [Param(name, f"{value}"[:500]) for name, value in settings.items()]
                for first in range(0, len(params), 100):  # the most of a call
                    self._client.log_batch(self._run_id, params=params[first : first + 100])
        except (MlflowException, OSError) as error:
            reason = " ".join(f"{error}".split())[:200].rstrip(".")
            raise UserError(
                f"logging.mlflow={project!r}: {reason}; set MLFLOW_TRACKING_URI, or leave it empty."
            ) from None
        self._last_step = 0

    def write(self, step: int, scalars: Scalars) -> None:
        from mlflow.entities import Metric

        now_ms, self._last_step = int(time.time() * 1000), step
        # A store of files has a directory for each part of a name, so no name may be one.
        parents = {name[:i] for name in scalars for i, c in enumerate(name) if c == "/"}
        found = [
            Metric(_mlflow_name(f"{name}/value" if name in parents else name), value, now_ms, step)
            for name, value in scalars.items()
        ]
        for first in range(0, len(found), 1000):  # the most of a call
            self._client.log_batch(self._run_id, metrics=found[first : first + 1000])

    def close(self, final: Scalars) -> None:
        self.write(self._last_step, final)
        self._client.set_terminated(self._run_id)


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


class Kept:
    """A tracker that failed is reported once and left alone; the run goes on without it."""

    def __init__(self, tracker: Tracker, warn: Callable[[str], None]):
        self._tracker: Tracker | None = tracker
        self._warn = warn
        self.repeats = tracker.repeats

    def write(self, step: int, scalars: Scalars) -> None:
        self._try(lambda tracker: tracker.write(step, scalars))

    def close(self, final: Scalars) -> None:
        self._try(lambda tracker: tracker.close(final))

    def _try(self, call: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except Exception as error:  # of the network, the disk, or a service that was killed
            name = type(self._tracker).__name__
            self._tracker = None
            self._warn(f"{name} gets no more rows: {type(error).__name__}: {error}")


OPTIONAL = {
    "wandb": WandB,
    "trackio": Trackio,
    "mlflow": MLflow,
}  # by field of config.logging and package


def check_trackers(logging: ml_collections.ConfigDict) -> None:
    """Raises UserError if a tracker's package is not installed."""
    for name in OPTIONAL:
        # A directory of this name next to the command would be a package without a file.
        found = importlib.util.find_spec(name) if logging[name] else None
        if logging[name] and (found is None or found.origin is None):
            raise UserError(
                f"logging.{name}={logging[name]!r} needs: pip install {name}; or leave it empty."
            )


def open_trackers(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    run_id: str,
    warn: Callable[[str], None],
) -> list[Tracker]:
    """TensorBoard, and those of `config.logging`; raises UserError if one refuses the run."""
    settings = flatten(jsonable(config.to_dict()))
    trackers: list[Tracker] = [Kept(TensorBoard(workdir / "tensorboard", settings), warn)]
    for name, kind in OPTIONAL.items():
        if project := config.logging[name]:
            trackers.append(Kept(kind(project, workdir, run_id, settings), warn))
    return trackers


def _plain(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)
