"""Checks everything that a run needs, starts nothing and writes nothing."""

from __future__ import annotations

import os
import pathlib
import secrets
import shutil
import threading
from typing import Any

import ml_collections
from jax.sharding import Mesh

from semrl_jax import models
from semrl_jax.cluster import find_place
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.environments.pool import EnvironmentPools
from semrl_jax.evaluation.entries import environment_names
from semrl_jax.rewards import VerifierPool
from semrl_jax.rollout.building import vllm_python
from semrl_jax.rollout.host_memory import available_bytes
from semrl_jax.runs.checkpoint_files import checkpoint_steps
from semrl_jax.runs.config_checks import remarks, validate
from semrl_jax.runs.inputs import Inputs
from semrl_jax.runs.memory import (
    check_room,
    device_bytes,
    least_parts,
    least_parts_sft,
    num_parameters,
    num_trained,
    peak_parts,
    per_parameter,
    size_text,
    width,
)
from semrl_jax.runs.policies import PolicySource
from semrl_jax.runs.setup import check_inputs, check_micro_batches
from semrl_jax.runs.sft_run import Inputs as Conversations
from semrl_jax.runs.sft_run import batches_of
from semrl_jax.runs.starting_model import source_of
from semrl_jax.runs.trackers import check_trackers
from semrl_jax.runs.workdir import check_workdir
from semrl_jax.sampling.reference_replicas import open_reference
from semrl_jax.sampling.replicas import is_embedded, open_client, take_addresses
from semrl_jax.settings.rewards import reward_functions
from semrl_jax.settings.training import updates_per_step
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError
from semrl_jax.support.run_directory import START, names_run, record_of

CONNECT_S = 10.0  # for replicas to answer: they are expected to run already
NAME_WIDTH = 12


class Summary:
    """Prints one line per thing that was checked."""

    def __init__(self, reporter: Reporter):
        self._reporter = reporter

    def __call__(self, name: str, *parts: str) -> None:
        self._reporter.line(f"{name:<{NAME_WIDTH}}{', '.join(filter(None, parts))}")


def dry_run(config: ml_collections.ConfigDict, workdir: str) -> int:
    """Checks a training run: settings, files, model, verifiers, replicas, memory, disk.

    Each of several processes checks its own devices. Returns 0, the exit code, or raises UserError.
    """
    validate(config)
    check_trackers(config.logging)
    for line in remarks(config):
        Reporter().notice(line)
    summary = Summary(Reporter())
    given, config, source = config, *_starting_model(config, workdir)
    mesh = _mesh(config, summary)
    check_micro_batches("training", config.training, mesh)
    take_addresses(config)
    environments = EnvironmentPools(config.environment, environment_names(config))
    with VerifierPool.of(config.rewards) as verifier, environments:
        inputs = check_inputs(config, mesh, verifier, environments, Reporter().line)
    if _is_whole(config):
        check_room(config, least_parts(config, inputs, mesh))
    if source is not None:
        source.check(inputs.policy)
    resumed = check_workdir(workdir, given, inputs.hashes())
    say_model(config, source, inputs.policy, summary)
    prompts, problems = len(inputs.prompts), len(inputs.problems)
    summary("data", f"{prompts} prompts", f"{problems} held-out problems")
    names = [f.function for f in reward_functions(config.rewards.functions)]
    own = f"environment {config.environment.name}" if config.environment.name else "math"
    summary("rewards", *(names or [config.rewards.function or own]))
    summary(
        "training",
        f"{config.algorithms.name}",
        f"{config.training.num_steps} steps of {config.training.responses_per_step} responses",
        f"{updates_per_step(config)} update(s) per step",
    )
    check_replicas(config, inputs.policy, inputs.tokenizer, pathlib.Path(workdir), summary)
    check_references(config, inputs, summary)
    _say_memory(config, inputs, mesh, summary)
    trained = {"training": inputs.policy, "critic": inputs.critic}
    size = _checkpoint_bytes(config, inputs.lora, **trained)
    _check_run(config, workdir, resumed, size, summary)
    return 0


def dry_run_sft(config: ml_collections.ConfigDict, workdir: str) -> int:
    """Checks a supervised fine-tuning; as `dry_run`."""
    validate(config)
    check_trackers(config.logging)
    reporter = Reporter()
    summary = Summary(reporter)
    given, config, source = config, *_starting_model(config, workdir)
    mesh = _mesh(config, summary)
    check_micro_batches("sft", config.sft, mesh)
    inputs = Conversations(config, mesh, reporter)
    if _is_whole(config):
        check_room(config, least_parts_sft(config, inputs.policy, inputs.lora, mesh))
    source.check(inputs.policy)
    resumed = check_workdir(workdir, given, inputs.hashes())
    say_model(config, source, inputs.policy, summary)
    summary("training", f"{len(batches_of(config, inputs))} steps")
    size = _checkpoint_bytes(config, inputs.lora, training=inputs.policy)
    _check_run(config, workdir, resumed, size, summary)
    return 0


def _starting_model(
    config: ml_collections.ConfigDict, workdir: str
) -> tuple[ml_collections.ConfigDict, PolicySource | None]:
    """The config with the architecture's directory as `model.path`, and where the weights are."""
    start = pathlib.Path(workdir) / START
    path = str(start) if (start / "config.json").is_file() else config.model.path
    if not path:
        return config, None
    if names_run(path):
        source = source_of(path)
    else:
        source = PolicySource(path, models.find_directory(path))
    config = config.copy_and_resolve_references()
    config.model.path = str(source.model)
    return config, source


def _is_whole(config: ml_collections.ConfigDict) -> bool:
    """Whether this process is the whole run, so that the mesh here is the mesh of the run."""
    return find_place(config.distributed, os.environ).num_processes == 1


def _mesh(config: ml_collections.ConfigDict, summary: Summary) -> Mesh:
    place = find_place(config.distributed, os.environ)
    if place.num_processes == 1:
        return models.make_mesh(config.mesh.to_dict())
    summary(
        "processes",
        f"{place.num_processes} (from {place.source})",
        "checked here as one process, without the mesh",
    )
    return models.make_mesh({"replica": 1, "fsdp": -1, "sequence": 1, "tensor": 1})


def say_model(
    config: ml_collections.ConfigDict,
    source: PolicySource | None,
    policy: models.Policy,
    summary: Summary,
) -> None:
    count = num_parameters(policy.config)
    checkpoint = source.checkpoint if source is not None else None
    summary(
        "model",
        str(checkpoint or config.model.path or "random"),
        policy.config.model_type,
        f"{count / 1e6:.3g} M parameters",
        f"adapters of rank {config.lora.rank}" if config.lora.rank else "",
        f"{policy.config.max_position_embeddings} tokens of context",
    )


def check_replicas(
    config: ml_collections.ConfigDict,
    policy: models.Policy,
    tokenizer: Any,
    directory: pathlib.Path,
    summary: Summary,
) -> None:
    """Connects to `rollout.addresses`; checks that replicas of its own could be started."""
    rollout = config.rollout
    if is_embedded(config):
        summary("replicas", "this process samples (JAX engine)")
    elif rollout.jax_processes:
        summary("replicas", f"{rollout.jax_processes} child process(es) (JAX engine)")
    elif not rollout.addresses:
        summary("replicas", f"a child process (vLLM, {vllm_python(config)})")
    else:
        run_id = record_of(directory).get("run_id", secrets.token_hex(8))
        brief = config.copy_and_resolve_references()
        brief.rollout.connect_timeout_s = min(rollout.connect_timeout_s, CONNECT_S)
        with open_client(
            brief,
            policy,
            tokenizer,
            threading.Lock(),
            Reporter(silent=True),
            run_id=run_id,
            attempt_id=secrets.token_hex(8),
            directory=directory,
        ):
            summary("replicas", *rollout.addresses, "all answer and fit")


def check_references(config: ml_collections.ConfigDict, inputs: Inputs, summary: Summary) -> None:
    """Says where the references are, and connects to `model.reference_addresses`."""
    brief, longest = config.copy_and_resolve_references(), inputs.longest_prompt(config)
    brief.rollout.connect_timeout_s = min(config.rollout.connect_timeout_s, CONNECT_S)
    for files in inputs.references.values():
        if not (addresses := files.named.addresses):
            summary("reference", files.named.path, "in the trainer")
        else:
            stop, silent = StopRequest(0.0, 0), Reporter(silent=True)
            with open_reference(brief, files, longest, stop, silent):
                summary("reference", files.named.path, *addresses, "all answer and fit")


def _checkpoint_bytes(
    config: ml_collections.ConfigDict,
    lora: models.Lora | None,
    **trained: models.Policy | models.ValueModel | None,
) -> float:
    """Size of a checkpoint of models, by section; with LoRA, of their adapters."""
    size = sum(
        per_parameter(config, name, model, lora).in_checkpoint * num_trained(model.config, lora)
        for name, model in trained.items()
        if model is not None
    )
    if dtype := config.checkpoints.export:
        size += width(dtype) * num_parameters(trained["training"].config)
    return size


def _say_memory(
    config: ml_collections.ConfigDict, inputs: Inputs, mesh: Mesh, summary: Summary
) -> None:
    parts = peak_parts(config, inputs, mesh)
    limit, where = device_bytes(), "per device"
    if limit is None:  # the cores are the devices, and share the memory of the machine
        count = len(mesh.local_devices)
        parts = {name: size * count for name, size in parts.items()}
        limit, where = available_bytes(), "free here"
    total = sum(parts.values())
    have = f"about {size_text(total)} of {size_text(limit)} {where}"
    summary("memory", f"arrays take {have}, the process and its compiler more:")
    summary("", *(f"{name} {size_text(size)}" for name, size in parts.items()))
    if total > limit:
        summary("", "warning: this may not fit; docs/memory.md says what to change")


def _check_run(
    config: ml_collections.ConfigDict, workdir: str, resumed: bool, size: float, summary: Summary
) -> None:
    """Checks that the checkpoints fit onto the disk, and says what the directory holds."""
    directory = pathlib.Path(workdir).absolute()
    existing = next(d for d in (directory, *directory.parents) if d.exists())
    folder, checkpoints = directory / "checkpoints", config.checkpoints
    saved = checkpoint_steps(folder) if folder.is_dir() else []
    count = checkpoints.keep + 1 + len(checkpoints.extra_steps)  # one more while it is written
    if checkpoints.keep_every:
        count += config.training.num_steps // checkpoints.keep_every
    needed, free = max(1, count - len(saved)) * size, shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"workdir={workdir}: {count} checkpoints of {size_text(size)} take {size_text(needed)} "
            f"more, and {existing} has {size_text(free)} free; make room or lower checkpoints.keep."
        )
    summary("disk", f"{size_text(needed)} for {count} checkpoint(s), of {size_text(free)} free")
    state = f"resumes, checkpoints of steps {saved}" if resumed else "a new run"
    summary("workdir", workdir, state)
    summary("dry run", "all checks passed; nothing was started or written")
