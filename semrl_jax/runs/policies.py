"""Finds the policies that a command names: runs, checkpoints, and Hugging Face directories."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import ml_collections
from jax.sharding import Mesh

from semrl_jax import data, models
from semrl_jax.models.of_config import starting_params
from semrl_jax.runs.adapters import restore_policy
from semrl_jax.runs.checkpoint_files import checkpoint_problem, checkpoint_steps
from semrl_jax.support.errors import UserError, prefixed
from semrl_jax.support.run_directory import START, distinct_names, record_of, run_of, setting_of
from semrl_jax.support.safe_files import read_json_object


class PolicySource(NamedTuple):
    """Where the weights of one policy are."""

    name: str  # unique among the policies of a command; also of its directory of results
    model: pathlib.Path  # directory with the architecture and the tokenizer
    checkpoint: pathlib.Path | None = None  # directory with the weights; None: they are in `model`
    step: int = 0  # of the run; 0 for a model directory
    adapter: pathlib.Path | None = None  # directory in PEFT's format, upon `model`
    family: str = ""  # `model.family` of the run; "": the field `model_type` in `model` decides

    def of_model(self, config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
        """A copy of the config with this model, and its run's family unless it has one."""
        config = config.copy_and_resolve_references()
        config.model.path, config.model.family = str(self.model), config.model.family or self.family
        return config

    def check(self, policy: models.Policy) -> None:
        """Raises UserError if the files are damaged or do not fit."""
        if self.checkpoint is None:
            models.check_params(self.model, policy.config)
            if self.adapter is not None:
                self._load_adapter(policy)
        elif problem := checkpoint_problem(self.checkpoint):
            raise UserError(f"checkpoint {self.checkpoint} cannot be used: {problem}.")
        else:
            check_model(self.checkpoint.parents[1], policy, self.model)

    def params(self, policy: models.Policy, mesh: Mesh | None = None) -> models.Params:
        """The weights on the mesh, or on the host or the default device; raises as `check`."""
        if self.checkpoint is None:
            params = starting_params(self.model, policy, mesh)
            if self.adapter is None:
                return params
            adapter, lora = self._load_adapter(policy)
            return models.adapted(adapter, lora.base(params))
        self.check(policy)
        return restore_policy(self.checkpoint, policy, self.model, mesh)

    def _load_adapter(self, policy: models.Policy) -> tuple[models.Params, models.Lora]:
        files = models.peft.find_adapter(self.adapter)
        return models.peft.load_adapter(files, policy.config, self.model, files.base_name)


def policy_names(paths: Sequence[str]) -> list[str]:
    """A name for the policies of each path, as short as it can be; see `find_policies`."""
    directories = [pathlib.Path(os.path.abspath(path)) for path in paths]
    directories = [_run_of_checkpoint(directory) or directory for directory in directories]
    different = list(dict.fromkeys(directories))
    names = dict(zip(different, distinct_names(different)))
    return [names[directory] for directory in directories]


def _run_of_checkpoint(path: pathlib.Path) -> pathlib.Path | None:
    """The run directory of RUN/checkpoints/STEP; None for another path."""
    is_one = path.parent.name == "checkpoints" and path.name.isdigit()
    return path.parents[1] if is_one else None


def find_policies(
    path: str, steps: Sequence[int] | None, field: str = "--policy", name: str = ""
) -> list[PolicySource]:
    """The policies of a path; UserError if there is none, or no checkpoint of a step.

    Args:
      path: a run directory; one of its checkpoints; a directory that `launch.convert` made of
        parameters; a Hugging Face directory; an adapter in PEFT's format; or a hub id.
      steps: of a run; 0 without a checkpoint is the model that the run began with. Empty: 0 and all
        checkpoints. None: the newest valid checkpoint.
      field: the flag or setting that names the path, for error messages.
      name: what each policy is called, before the step of a run; empty: the directory's name.
    """
    directory = pathlib.Path(path)
    try:
        os.scandir(directory).close()
    except PermissionError as error:
        raise UserError(f"{field}={path} cannot be read: {error.strerror}.") from None
    except OSError:  # not there, perhaps a hub id, or no directory
        pass
    run = _run_of_checkpoint(directory)
    name = name or (run or directory).absolute().name
    if run is not None:
        if steps:
            raise UserError(
                f"--steps chooses checkpoints of a run, and {field}={path} is one; name {run}."
            )
        saved = checkpoint_steps(directory.parent) if directory.parent.is_dir() else []
        if int(directory.name) not in saved:
            raise UserError(
                f"{field}={path} does not exist; there are checkpoints of steps {saved}."
            )
        return _of_run(run, [int(directory.name)], field, name)
    if (directory / "checkpoints").is_dir() or run_of(directory) is not None:
        return _of_run(directory, steps, field, name)
    if steps is not None:
        raise UserError(f"--steps is for a run, and {field}={path} is none; leave it out.")
    if models.peft.is_adapter(path):
        base = models.peft.find_adapter(path).base()
        return [PolicySource(name, base, adapter=directory)]
    try:
        model = models.find_directory(path)
    except UserError as error:
        raise UserError(f"{field}={path} is no run, and {error}") from None
    return [PolicySource(name, model)]


def _of_run(
    directory: pathlib.Path, steps: Sequence[int] | None, field: str, name: str
) -> list[PolicySource]:
    model = model_of(directory)
    family = setting_of(directory, "model", "family") or ""  # older records have none
    named = functools.partial(PolicySource, model=model, family=family)
    folder = directory / "checkpoints"
    saved = checkpoint_steps(folder) if folder.is_dir() else []
    if steps is None:
        for step in reversed(saved):
            if not checkpoint_problem(folder / str(step)):
                return [named(f"{name}-step{step}", checkpoint=folder / str(step), step=step)]
        raise UserError(
            f"{field}={directory} has no valid checkpoint ({saved}); --steps=0 is its first model."
        )
    found = []
    for step in steps or [0, *saved]:
        if step in saved:
            found.append(named(f"{name}-step{step}", checkpoint=folder / str(step), step=step))
        elif step == 0:
            found.append(named(f"{name}-step0"))
        else:
            raise UserError(
                f"--steps has {step}, but {directory} has {saved}, and 0, its first model."
            )
    if not found:
        raise UserError(f"{field}={directory} has no checkpoint; --steps=0 is its first model.")
    return found


def model_of(directory: pathlib.Path) -> pathlib.Path:
    """The model directory with the architecture and tokenizer of a run's checkpoints."""
    record = record_of(directory)
    if "run_id" not in record:
        return directory  # made by launch.convert from parameters
    if (directory / START / "config.json").is_file():
        return directory / START
    path = setting_of(directory, "model", "path")
    if not isinstance(path, str):
        raise UserError(f"{directory} is not a run: its config.json has no model.path.")
    if not path:
        return models.find_directory(directory / "warm_start")
    with prefixed(
        f"{directory} began with model.path={path!r}; bring it back, or start this command in the "
        "directory where the run was started"
    ):
        return models.find_directory(path)


def check_model(run: pathlib.Path, policy: models.Policy, model: pathlib.Path) -> None:
    """UserError if the model that a run began with has another architecture or tokenizer now."""
    if model.absolute().is_relative_to(run.absolute()):
        return  # nobody else writes there
    try:
        recorded = read_json_object(run / "inputs.json")
    except FileNotFoundError:  # of launch.convert, or older
        return
    tokenizer = data.load_tokenizer(model)
    found = {"architecture": policy.config.hash, "tokenizer": data.tokenizer_hash(tokenizer)}
    for name, value in found.items():
        if recorded.get(name, value) != value:
            raise UserError(
                f"the run in {run} began with another {name} than {model} has (see inputs.json); "
                "restore the model, or start this command in the directory where the run was "
                "started."
            )
