"""Checks everything that a run needs, starts nothing and writes nothing."""

from __future__ import annotations

import functools
import math
import os
import pathlib
import secrets
import shutil
import threading
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections
from jax.sharding import Mesh

from semrl_jax import models
from semrl_jax.cluster import find_place
from semrl_jax.console import Reporter
from semrl_jax.errors import UserError
from semrl_jax.rewards import VerifierPool
from semrl_jax.rollout.building import configured_mesh, vllm_python
from semrl_jax.rollout.memory import available_bytes
from semrl_jax.runs.checkpoint_files import checkpoint_steps
from semrl_jax.runs.config import validate
from semrl_jax.runs.fine_tuning import Inputs as Conversations
from semrl_jax.runs.fine_tuning import batches_of
from semrl_jax.runs.inference import check_inference
from semrl_jax.runs.policies import PolicySource
from semrl_jax.runs.run_directory import START, names_run, record_of
from semrl_jax.runs.setup import Inputs, check_inputs, check_micro_batches, optimizer_of
from semrl_jax.runs.starting_model import source_of
from semrl_jax.runs.trackers import check_trackers
from semrl_jax.runs.workdir import check_workdir
from semrl_jax.sampling.replicas import is_embedded, open_client, take_addresses
from semrl_jax.settings.rewards import reward_functions
from semrl_jax.settings.rollout import weight_dtype
from semrl_jax.training.batch_rules import all_needs
from semrl_jax.training.memory import PerParameter, update_bytes

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

    With several processes, each checks what it sees itself, on its own devices.

    Returns:
      0, the exit code.

    Raises:
      UserError: for the first thing that would end the run.
    """
    validate(config)
    check_trackers(config.logging)
    summary = Summary(Reporter())
    given, config, source = config, *_starting_model(config, workdir)
    mesh = _mesh(config, summary)
    check_micro_batches("training", config.training, mesh)
    take_addresses(config)
    with VerifierPool.of(config.rewards) as verifier:
        inputs = check_inputs(config, mesh, verifier, Reporter().line)
    if source is not None:
        source.check(inputs.policy)
    resumed = check_workdir(workdir, given, inputs.hashes())
    _say_model(config, source, inputs.policy, summary)
    prompts, problems, data = len(inputs.prompts), len(inputs.problems), config.data
    summary("data", f"{prompts} prompts", f"{problems} held-out problems")
    names = [f.function for f in reward_functions(config.rewards.functions)]
    summary("rewards", *(names or [config.rewards.function or "math"]))
    summary(
        "training",
        f"{config.algorithms.name}",
        f"{config.training.num_steps} steps of {config.training.responses_per_step} responses",
        f"{data.prompts_per_step // config.training.prompts_per_minibatch} update(s) per step",
    )
    check_replicas(config, inputs.policy, inputs.tokenizer, pathlib.Path(workdir), summary)
    _say_memory(config, inputs, mesh, summary)
    _check_run(config, workdir, resumed, _checkpoint_bytes(config, inputs), summary)
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
    source.check(inputs.policy)
    resumed = check_workdir(workdir, given, inputs.hashes())
    _say_model(config, source, inputs.policy, summary)
    summary("training", f"{len(batches_of(config, inputs))} steps")
    policy = inputs.policy
    per = _per_parameter(config, "training", policy, inputs.lora)
    size = per.in_checkpoint * _num_trained(policy.config, inputs.lora)
    _check_run(config, workdir, resumed, size, summary)
    return 0


@functools.cache
def num_parameters(architecture: models.DecoderConfig, mesh: Mesh | None = None) -> int:
    """Numbers in all weights, or in those of one device."""
    return models.num_parameters(architecture, {} if mesh is None else mesh.shape)


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


def _say_model(
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


def dry_run_policy(
    config: ml_collections.ConfigDict,
    source: PolicySource,
    policy: models.Policy,
    tokenizer: Any,
    output: pathlib.Path,
    reporter: Reporter,
    *counts: str,
) -> None:
    """Checks what sampling from a policy needs: weights, mesh, limits, replicas, directory.

    Args:
      config: see `open_inference`.
      policy, tokenizer: of the source.
      output: directory of the results.
      counts: what would be sampled, for the summary.
    """
    summary = Summary(reporter)
    check_inference(config, policy, tokenizer)
    source.check(policy)
    summary("policy", source.name)
    _say_model(config, source, policy, summary)
    check_replicas(config, policy, tokenizer, output, summary)
    summary("to sample", *counts)
    existing = next(d for d in (output.absolute(), *output.absolute().parents) if d.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise UserError(f"--output={output} cannot be made: {existing} cannot be written to.")
    state = "exists; the same command continues it" if output.exists() else "new"
    summary("output", str(output), state)
    summary("dry run", "all checks passed; nothing was started or written")


def check_replicas(
    config: ml_collections.ConfigDict,
    policy: models.Policy,
    tokenizer: Any,
    directory: pathlib.Path,
    summary: Summary,
) -> None:
    """Connects to `rollout.addresses`; checks that replicas of its own could be started.

    Args:
      directory: of the run that the replicas may belong to.
    """
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


def _checkpoint_bytes(config: ml_collections.ConfigDict, inputs: Inputs) -> float:
    """Of the policy and the critic; with LoRA, of their adapters."""
    size = 0.0
    for name, model in (("training", inputs.policy), ("critic", inputs.critic)):
        if model is not None:
            per = _per_parameter(config, name, model, inputs.lora)
            size += per.in_checkpoint * _num_trained(model.config, inputs.lora)
    return size


def _per_parameter(
    config: ml_collections.ConfigDict,
    name: str,
    model: models.Policy | models.ValueModel,
    lora: models.Lora | None,
) -> PerParameter:
    shapes = model.shapes() if lora is None else lora.trained_shapes(model.shapes())
    return PerParameter.of(optimizer_of(config, name), shapes)


def _num_trained(
    architecture: models.DecoderConfig, lora: models.Lora | None, mesh: Mesh | None = None
) -> float | int:
    """Numbers that are trained, in all or on one device."""
    if lora is None:
        return num_parameters(architecture, mesh)
    shards = 1 if mesh is None else mesh.shape["fsdp"] * mesh.shape["tensor"]
    return models.peft.num_parameters(architecture, lora) / shards


def _say_memory(
    config: ml_collections.ConfigDict, inputs: Inputs, mesh: Mesh, summary: Summary
) -> None:
    parts = memory_parts(config, inputs, mesh)
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    where = "per device"
    if limit is None:  # the cores are the devices, and share the memory of the machine
        count = len(mesh.local_devices)
        parts = {name: size * count for name, size in parts.items()}
        limit, where = available_bytes(), "free here"
    total = sum(parts.values())
    have = f"about {_size(total)} of {_size(limit)} {where}"
    summary("memory", f"arrays take {have}, the process and its compiler more:")
    summary("", *(f"{name} {_size(size)}" for name, size in parts.items()))
    if total > limit:
        summary("", "warning: this may not fit; docs/memory.md says what to change")


def memory_parts(
    config: ml_collections.ConfigDict, inputs: Inputs, mesh: Mesh
) -> Mapping[str, float | int]:
    """Bytes of one device by what takes them; estimates, see docs/memory.md."""
    architecture, training, rollout = inputs.policy.config, config.training, config.rollout
    is_host = mesh.devices.flat[0].platform == "cpu"  # what is offloaded is in the same memory
    params = num_parameters(architecture, mesh)
    length = rollout.max_prompt_tokens + rollout.max_response_tokens
    rows = training.micro_batch_size / math.prod(mesh.shape[axis] for axis in models.DATA_AXES)
    if training.micro_batch_tokens:
        rows = training.micro_batch_tokens / length
    per = _per_parameter(config, "training", inputs.policy, inputs.lora)
    update = update_bytes(
        architecture,
        config.model.remat,
        _num_trained(architecture, inputs.lora, mesh),
        num_rows=rows,
        num_columns=length / mesh.shape["sequence"],
        num_slots=rows * rollout.max_response_tokens,
        per_parameter=per.in_update,
    )
    needs = all_needs(inputs.algorithm, config)
    parts = {"update": update}
    is_away = "reference" in training.offload and not is_host
    if inputs.lora is not None:  # the base is the reference
        parts["base"] = _width(config.lora.base_dtype) * params
    elif (needs.reference or needs.early_reference) and not is_away:
        parts["reference"] = _width(config.model.reference_dtype) * params
    if inputs.critic is not None:
        critic = inputs.critic.config
        per = _per_parameter(config, "critic", inputs.critic, inputs.lora)
        parts["critic"] = per.in_update * _num_trained(critic, inputs.lora, mesh)
        if inputs.lora is not None and inputs.critic_directory is not None:
            width = _width(config.lora.base_dtype)
            parts["base of the critic"] = width * num_parameters(critic, mesh)
    if inputs.reward_model is not None:
        count = num_parameters(inputs.reward_model.model.config, mesh)
        parts["reward model"] = _width(config.rewards.model.dtype) * count
    if is_embedded(config):
        engine = configured_mesh(config, architecture)
        width, count = _width(weight_dtype(config)), num_parameters(architecture)
        keys = 2 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim
        responses = min(rollout.jax_max_batch, training.responses_per_step)
        parts["replica"] = width * count / engine.shape["tensor"]
        parts["its cache"] = _width(config.model.compute_dtype) * keys * length * responses
        parts["its cache"] /= engine.size
    return parts


def _check_run(
    config: ml_collections.ConfigDict,
    workdir: str,
    resumed: bool,
    size: float,
    summary: Summary,
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
            f"workdir={workdir}: {count} checkpoints of {_size(size)} take {_size(needed)} more, "
            f"and {existing} has {_size(free)} free; make room, name another workdir, or lower "
            "checkpoints.keep."
        )
    summary("disk", f"{_size(needed)} for {count} checkpoint(s), of {_size(free)} free")
    state = f"resumes, checkpoints of steps {saved}" if resumed else "a new run"
    summary("workdir", workdir, state)
    summary("dry run", "all checks passed; nothing was started or written")


def _width(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def _size(num_bytes: float | int) -> str:
    """As 3.2 GiB or 5.1 MiB."""
    unit, scale = ("GiB", 2**30) if num_bytes >= 2**30 else ("MiB", 2**20)
    return f"{num_bytes / scale:.3g} {unit}"
