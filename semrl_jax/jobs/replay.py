"""Runs steps of a run again, and finds the first number that differs from what it recorded."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import pyarrow as pa
from jax.sharding import SingleDeviceSharding

from configs import recorded
from semrl_jax.models import array_sums
from semrl_jax.runs.checkpoint_files import restore_tree, stored_shapes
from semrl_jax.runs.copies import CHECKPOINTS, MANIFEST
from semrl_jax.runs.differences import Difference, differences
from semrl_jax.runs.forks import ANSWERS, Fork, write_fork
from semrl_jax.runs.lifecycle import start
from semrl_jax.runs.policies import find_policies, model_of
from semrl_jax.runs.records import record_of as record_of_result
from semrl_jax.runs.setup import OpenRun, open_run
from semrl_jax.runs.workdir import new_record, versions
from semrl_jax.sampling.recorded import StepRecord, file_of, read_record
from semrl_jax.settings.algorithms import importance_options
from semrl_jax.settings.config import unknown_field
from semrl_jax.settings.moved import with_present_names
from semrl_jax.settings.rules import flatten
from semrl_jax.support import response_files
from semrl_jax.support.errors import UserError
from semrl_jax.support.rows import STARTS, read_rows
from semrl_jax.support.run_directory import record_of, setting_of
from semrl_jax.support.safe_files import jsonable, remove
from semrl_jax.training.loop import run_steps
from semrl_jax.training.traces import Sums, on_host
from semrl_jax.training.train_state import POLICY, TrainState

# A re-run writes nothing but its own temporary directory, and evaluates nothing.
OF_REPLAYS: Mapping[str, Any] = {
    "logging.replay_every": 1,
    "logging.rollouts_every_steps": 0,
    "logging.plot_every_steps": 0,
    "logging.wandb": "",
    "logging.trackio": "",
    "logging.mlflow": "",
    "checkpoints.every_steps": 10**9,
    "checkpoints.keep_every": 0,
    "checkpoints.extra_steps": (),
    "checkpoints.export": "",
    "checkpoints.copy_to": "",
    "training.export": "",
    "evaluation.every_steps": 0,
    "profile.steps": "",
    "distributed.coordinator": "",
    "distributed.num_processes": 1,
    "distributed.process_id": -1,
}
OF_NO_NUMBER = ("logging.", "evaluation.", "checkpoints.", "profile.", "distributed.")
OF_SAMPLING = ("rollout.", "data.", "environment.")
# Sections whose settings decide what inputs.json has the hashes of.
OF_INPUTS = ("seed", "data", "model", "critic", "rewards", "lora", "rollout", "environment")


class Replay(NamedTuple):
    """Steps of a run to do again."""

    run: pathlib.Path
    first: int  # the step of a checkpoint, or 0
    last: int  # included
    changes: Mapping[str, Any] = {}  # settings that differ from the run's, by full name
    recorded: bool = False  # responses of the records in place of sampling
    weights: str = ""  # a policy to begin with; "": the checkpoint has it
    source: pathlib.Path | None = None  # directory with the checkpoint; None: the run
    # Where the state after the last step is saved, as the checkpoint of a run; None: nowhere.
    save: pathlib.Path | None = None

    def config(self) -> ml_collections.ConfigDict:
        """The settings of the re-run; UserError for a change that cannot be."""
        try:
            config = recorded.get_config(str(self.run / "config.json"))
            own = with_present_names(settings_at(self.run, self.first))
            config.update_from_flattened_dict(
                {name: tuple(x) if isinstance(x, list) else x for name, x in own.items()}
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{self.run} has a setting that this version lacks ({str(error).strip():.200}); "
                "name a checkout of its version with --code."
            ) from None
        if self.recorded:
            for field in self.changes:
                if field.startswith(OF_SAMPLING):
                    raise UserError(
                        f"--set={field} is of the sampling, whose responses --recorded takes from "
                        "the records; leave one of them out."
                    )
            # A quantised engine asks for a correction, which is of its responses here too.
            config.algorithms.importance.level = importance_options(config)["level"]
            fields = {"recorded": str(self.run.absolute()), "engine": "jax", "addresses": ()}
            fields |= {"addresses_file": "", "jax_processes": 0, "vllm_quantization": ""}
            config.rollout.update(fields)
        elif config.rollout.engine == "vllm" or self.changes.get("rollout.engine") == "vllm":
            raise UserError(
                f"{self.run} samples with vLLM, whose tokens depend on concurrent requests: it "
                "replays from recorded responses only (--recorded, with logging.replay_every)."
            )
        config.update_from_flattened_dict(dict(OF_REPLAYS))
        set_fields(config, self.changes)
        return config


class Steps(NamedTuple):
    """What a run has: the steps of its rows, its checkpoints and its records."""

    rows: Sequence[int]
    checkpoints: Sequence[int]


class Parent(NamedTuple):
    """The run that a fork continues, and the first step that is the fork's own."""

    run: pathlib.Path
    step: int


class Finding(NamedTuple):
    """Where two sides part: the first difference of each stage of one step, at least one."""

    differences: Sequence[Difference]
    left: StepRecord
    right: StepRecord

    @property
    def first(self) -> Difference:
        return self.differences[0]


def set_fields(config: ml_collections.ConfigDict, fields: Mapping[str, Any]) -> None:
    """Sets fields by full name; UserError for an unknown one, or a value of another type."""
    known = flatten(config)
    for field, value in fields.items():
        if field not in known:
            raise UserError(f"--set={field}: {unknown_field(config, field)}")
        if field in OF_REPLAYS or field in ("rollout.recorded", "training.resume_from"):
            raise UserError(f"--set={field}: a re-run has its own value of it; leave it out.")
        try:
            config.update_from_flattened_dict({field: value})
        except (TypeError, ValueError):
            kind = type(known[field]).__name__
            raise UserError(f"--set={field}={value!r} must be of type {kind}.") from None


def steps_of(run: pathlib.Path) -> Steps:
    """UserError if it is no run of launch.train with rows."""
    record = record_of(run)
    if "run_id" not in record or not isinstance(record.get("config"), dict):
        raise UserError(f"{run} is no run: it has no config.json of one.")
    rows = [row["step"] for row in read_rows(run / "metrics.jsonl") if "reward/mean" in row]
    if not rows:
        raise UserError(f"{run} has no step of launch.train in its metrics.jsonl.")
    folder = run / CHECKPOINTS
    saved = sorted(int(file.parent.name) for file in folder.glob(f"*/{MANIFEST}"))
    return Steps(rows, saved)


def parent_of(run: pathlib.Path) -> Parent | None:
    """None for a run that is no fork (training.resume_from)."""
    path = setting_of(run, "training", "resume_from")
    if not path:
        return None
    folder = pathlib.Path(path).absolute()
    return Parent(folder.parents[1], int(folder.name))


def maker_of(run: pathlib.Path, step: int) -> pathlib.Path:
    """The run that made a step: this one, or one that it continues, if that is still there."""
    parent = parent_of(run)
    if parent is None or step >= parent.step or not record_of(parent.run):
        return run
    return maker_of(parent.run, step)


def inherited(run: pathlib.Path, step: int) -> Parent | None:
    """The parent, if this step is from there; UserError if that run is not there."""
    parent = parent_of(run)
    if parent is None or step >= parent.step:
        return None
    if maker_of(run, step) == run:
        raise UserError(
            f"{run} continues {parent.run} from step {parent.step} on, and that run is not there; "
            f"put it back, or choose --from={parent.step} or a later step."
        )
    return parent


def chosen_steps(run: pathlib.Path, begin: int | None, end: int | None) -> tuple[int, int, int]:
    """The checkpoint to start from, and the first and the last step to compare; or UserError."""
    steps = steps_of(run)
    end = steps.rows[-1] if end is None else end
    usable = [step for step in steps.checkpoints if step <= end]
    if begin is None:
        if not usable:
            raise UserError(
                f"{run} has no checkpoint at or before step {end} (it has "
                f"{list(steps.checkpoints)}); --from=0 begins where the run began."
            )
        begin = usable[0]
    if not 0 <= begin <= end <= steps.rows[-1]:
        raise UserError(
            f"--from={begin} --to={end}: {run} has steps {steps.rows[0]} to {steps.rows[-1]}; "
            "name steps of it, the first one first."
        )
    if parent := inherited(run, begin):
        first, *_ = chosen_steps(parent.run, begin, min(end, parent.step - 1))
        return first, begin, end
    return max([0, *(step for step in usable if step <= begin)]), begin, end


def remarks(run: pathlib.Path) -> list[str]:
    """What differs between the run and this process, apart from settings, and may change bits."""
    found, own = [], versions()
    for name, version in record_of(run).get("versions", {}).items():
        if own.get(name, version) != version:
            found.append(f"{name} {version[:12] or 'unknown'} -> {own[name][:12] or 'unknown'}")
    here = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    starts = read_rows(run / STARTS)
    for processes, devices in dict.fromkeys((row["processes"], row["devices"]) for row in starts):
        if processes != starts[-1]["processes"]:
            found.append(f"processes {processes} -> {starts[-1]['processes']}")
        elif processes == 1 and devices != here:
            found.append(f"devices {devices} -> {here}")
    return [f"another version or machine than the run's: {', '.join(found)}"] if found else []


def attempts(run: pathlib.Path) -> dict[int, dict[str, Any]]:
    """The settings of steps that differ from those of `config.json`, by the first such step.

    Settings that change no number of a re-run are left out.
    """
    found: dict[int, dict[str, Any]] = {0: {}}
    for row in read_rows(run / STARTS):
        changed = dict(map(_changed_setting, row["changed"]))
        changed = {n: value for n, value in changed.items() if not n.startswith(OF_NO_NUMBER)}
        # An attempt repeats the steps from its first one on.
        found = {step: earlier for step, earlier in found.items() if step < max(row["step"], 1)}
        if changed != found[max(found)]:
            found[row["step"]] = changed
    return found


def _changed_setting(line: str) -> tuple[str, Any]:
    """The field and the new value of a line "field: old -> new" of `starts.jsonl`."""
    field, _, values = line.partition(": ")
    for arrow in re.finditer(" -> ", values):  # a text may have one, too
        with contextlib.suppress(SyntaxError, ValueError):
            ast.literal_eval(values[: arrow.start()])
            return field, ast.literal_eval(values[arrow.end() :])
    raise UserError(f"starts.jsonl has the line {line!r:.200}, which names no two values.")


def settings_at(run: pathlib.Path, step: int) -> dict[str, Any]:
    found = attempts(run)
    return found[max(begin for begin in found if begin <= step)]


def replayed(replay: Replay) -> Iterator[StepRecord]:
    """The records of the steps, one after the other, in this process.

    Nothing is left of the re-run, and the run stays as it is. UserError as `launch.train`.
    """
    with tempfile.TemporaryDirectory(prefix="semrl-replay-") as temporary:
        directory = pathlib.Path(temporary) / "run"
        with named(replay.run, directory):
            config = replay.config()
            write_start(replay, directory, config)
            work = functools.partial(_work, replay)
            with contextlib.closing(start(config, str(directory), open_run, work, True)) as steps:
                if code := (yield from steps):  # a signal
                    raise SystemExit(code)


@contextlib.contextmanager
def named(run: pathlib.Path, directory: pathlib.Path) -> Iterator[None]:
    """Lets a message name the run, not the temporary copy of its start."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace(str(directory), str(run))) from None


def write_start(replay: Replay, directory: pathlib.Path, config: ml_collections.ConfigDict) -> None:
    """Writes what the run had at the first step into a new directory, with these settings."""
    directory.mkdir()
    source = (replay.source or replay.run).absolute()
    path = source / CHECKPOINTS / str(replay.first)
    fork = Fork(str(path), source, replay.first, {})
    try:
        write_fork(fork, directory, new_record(jsonable(config.to_dict())))
    except UserError as error:
        raise UserError(str(error).removeprefix(f"training.resume_from={path}: ")) from None
    except OSError as error:  # a full disk, or a run that still removes checkpoints
        raise UserError(
            f"the start of step {replay.first} cannot be copied to {directory.parent} ({error}); "
            "make room, name another TMPDIR, or another --from."
        ) from None
    if any(field.partition(".")[0] in OF_INPUTS for field in replay.changes):
        remove(directory / "inputs.json")
        remove(directory / ANSWERS)


def _work(
    replay: Replay, config: ml_collections.ConfigDict, opened: OpenRun
) -> Iterator[StepRecord]:
    run, state = opened.run, opened.first_state()
    if replay.weights:
        state = _with_weights(state, opened, replay)
    with run.reporter.bar("replay", replay.last + 1, "steps", done=replay.first) as bar:
        for result in run_steps(opened.parts, state, bar.status):
            state = result.state
            bar.advance()
            yield record_of_result(result)
            if result.step == replay.last:
                break
        else:
            raise UserError(
                f"the re-run ended before step {replay.last}, by its training.num_steps or "
                "training.num_epochs; leave them as the run has them."
            )
    if replay.save is not None:
        run.checkpoints.save(state)
        if failure := run.checkpoints.failure():
            raise UserError(f"the state after step {replay.last} could not be kept: {failure}.")
        shutil.copytree(run.workdir.path, replay.save, dirs_exist_ok=True)
    return 0


def _with_weights(state: TrainState, opened: OpenRun, replay: Replay) -> TrainState:
    """The state with the parameters of the policy that `--weights` names."""
    learner, path = opened.learner, replay.weights
    if learner.lora is not None or learner.optimizer.param_dtype != "float32":
        raise UserError(
            f"--weights={path} replaces float32 parameters, but {replay.run} trains "
            f"{'adapters' if learner.lora else learner.optimizer.param_dtype}; leave it out."
        )
    given = pathlib.Path(path)
    with tempfile.TemporaryDirectory() as directory:
        model = pathlib.Path(directory)
        file = model / "model.safetensors"
        if given.is_file():  # a safetensors file with the tensors of the model
            file.symlink_to(given.absolute())
            for other in model_of(replay.run).iterdir():
                if other.is_file() and not other.name.startswith("model"):
                    (model / other.name).symlink_to(other.absolute())
            path = directory
        with named(given, model), named(given, file):
            (source,) = find_policies(path, None, "--weights")
            found = source.params(learner.policy, learner.mesh)
    put = lambda new, old: jax.device_put(new.astype(old.dtype), old.sharding)  # noqa: E731
    return state._replace(params=jax.tree.map(put, found, state.params))


def known_record(run: pathlib.Path, step: int, row: Mapping[str, Any] | None) -> StepRecord:
    """All that the files of a run say about a step; `row` is its row of the log.

    The record of the step, else its recorded responses; and the weights of checkpoints before and
    after it. UserError for a damaged file.
    """
    record = read_record(file_of(run, step))
    columns, facts = pa.table({}), {}
    if record is not None:
        columns, facts = record.columns, dict(record.facts)
    elif (file := run / "rollouts" / f"step_{step:06d}.parquet").is_file():
        columns = response_files.read(file, ("group_id", "sample_index"))
    if row is not None:
        facts["row"] = row
    for name, at in (("before", step), ("after", step + 1)):
        folder = run / CHECKPOINTS / str(at)
        if name not in facts and (folder / MANIFEST).is_file():
            facts[name] = checkpoint_sums(folder)
    return StepRecord(step, columns, facts)


def known_records(run: pathlib.Path) -> Callable[[int], StepRecord]:
    """`known_record` by step; the run that made a step has its files."""
    rows = {row["step"]: row for row in read_rows(run / "metrics.jsonl")}
    return lambda step: known_record(maker_of(run, step), step, rows.get(step))


def checkpoint_sums(folder: pathlib.Path) -> Sums:
    """`traces.parameter_sums` of a checkpoint."""
    stored = stored_shapes(folder)
    wanted = {"params": stored["params"]}
    if critic := stored.get("critic"):
        wanted["critic"] = {"params": critic["params"]}
    here = SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), wanted
    )
    found = restore_tree(folder, like)
    named = {POLICY: found["params"]}
    if "critic" in found:
        named["critic"] = found["critic"]["params"]
    return on_host(array_sums(named))


@dataclasses.dataclass
class Compared:
    """Compares steps one after the other, and notes what was there to compare."""

    records: list[StepRecord] = dataclasses.field(default_factory=list)

    def note(self, left: StepRecord, right: StepRecord) -> None:
        """Notes what both records have; of the responses, only whether there are any."""
        count = min(len(left.columns), len(right.columns), 1)
        facts = {name: fact for name, fact in left.facts.items() if name in right.facts}
        self.records.append(StepRecord(left.step, left.columns.slice(0, count), facts))

    def first(
        self, left: Callable[[int], StepRecord], right: Iterator[StepRecord], begin: int = 0
    ) -> Finding | None:
        """Where the steps from `begin` on part first; None if they do not."""
        with contextlib.closing(right):
            for other in right:
                if other.step < begin:
                    continue
                own = left(other.step)
                self.note(own, other)
                if found := list(differences(own, other)):
                    return Finding(found, own, other)
        return None
