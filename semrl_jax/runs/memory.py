"""The memory of a run: its least, which is checked before weights are loaded, and an estimate."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import ml_collections
from jax.sharding import Mesh

from semrl_jax import models
from semrl_jax.models.hosts import processes_of
from semrl_jax.models.sharding import platform_of
from semrl_jax.rollout.building import configured_mesh
from semrl_jax.rollout.host_memory import available_bytes, total_bytes
from semrl_jax.runs.inputs import Inputs
from semrl_jax.runs.optimizers import optimizer_of
from semrl_jax.sampling.exchange import sampling_processes
from semrl_jax.sampling.replicas import is_embedded
from semrl_jax.settings.rollout import longest_prompt, num_earlier, rows_of_slots, weight_dtype
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError
from semrl_jax.training.update_memory import PerParameter, update_parts

PARAMETERS, ADAPTERS, BASE, GRADIENTS = "parameters", "adapters", "base", "gradients"
REFERENCE, REPLICA, CACHE = "reference", "replica", "its cache"
UPDATE, EARLIER = "update", "earlier weights"


def check_room(
    config: ml_collections.ConfigDict,
    parts: Mapping[str, float | int],
    reporter: Reporter | None = None,
) -> None:
    """UserError for a run that could not fit even if everything else on this machine ended.

    `reporter` gets a line with the parts, and a notice if too little is free now. Devices that do
    not tell their memory are not checked.
    """
    is_host = jax.local_devices()[0].platform == "cpu"
    limit = total_bytes() if is_host else device_bytes()
    if limit is None:
        return
    needed, where = sum(parts.values()), "this machine or container" if is_host else "a device"
    of = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())
    if needed > limit:
        model = config.model
        fields = ("path",) if model.path else ("hidden_size", "num_layers")
        named = ", ".join(f"model.{name}={model[name]!r}" for name in fields)
        ways = "".join(f", {way}" for way in _ways_out(config, parts, is_host))
        raise UserError(
            f"{named}: training needs at least {size_text(needed)} of memory ({of}), and {where} "
            f"has {size_text(limit)}; choose a smaller model{ways} or more memory. docs/memory.md"
        )
    if reporter is None:
        return
    reporter.line(f"memory: at least {size_text(needed)} of {size_text(limit)}: {of}")
    if is_host and needed > (free := available_bytes()):
        reporter.notice(
            f"memory: only {size_text(free)} are free now, so the system may kill this process; "
            "end other programs, or see docs/memory.md."
        )


def _ways_out(
    config: ml_collections.ConfigDict, parts: Mapping[str, float | int], is_host: bool
) -> list[str]:
    """Settings that lower what a run needs."""
    ways = []
    if not config.lora.rank:
        ways.append("adapters (lora.rank)")
        if config.optimizer.name == "adamw":
            ways.append("optimizer.name='adafactor'")
    if REFERENCE in parts and config.model.reference_dtype == "float32":
        ways.append("model.reference_dtype='bfloat16'")
    if REPLICA in parts:
        ways.append("replicas on other machines (rollout.addresses)")
    if not is_host:
        ways.append("more devices (mesh.fsdp)")
    return ways


def least_parts(
    config: ml_collections.ConfigDict, inputs: Inputs, mesh: Mesh
) -> dict[str, float | int]:
    """Bytes that a training run holds at the same time, by what holds them; a lower bound.

    They are those of one device, or of all devices of this process if these share the memory of
    the machine. Activations, logits, caches, programs and short copies come on top.
    """
    sizes = _Sizes(config, mesh, inputs.lora)
    # A run without steps, for evaluation alone, has no gradients.
    parts = sizes.of_update("training", inputs.policy, config.training.num_steps > 0)
    architecture = inputs.policy.config
    count = num_trained(architecture, inputs.lora, mesh) * sizes.num_devices
    parts |= _kept(config, inputs, count, sizes.frozen, sizes.away)
    if inputs.critic is not None:
        # Without its gradients, which come after the gradients of the policy.
        parts["critic"] = sum(sizes.of_update("critic", inputs.critic, False).values())
    if is_embedded(config) and jax.process_index() in sampling_processes(processes_of(mesh)):
        # Devices of one machine may share one copy.
        parts[REPLICA] = width(config.model.compute_dtype) * num_parameters(architecture)
        if not is_machine(mesh):
            parts[REPLICA] /= configured_mesh(config, architecture).shape["tensor"]
        if not num_earlier(config.rollout):  # it has its weights while there are no gradients
            away = (GRADIENTS,)
            if config.rollout.in_turns and not is_machine(mesh):
                away = parts.keys() - {PARAMETERS, ADAPTERS, BASE, REPLICA}
            parts[REPLICA] -= min(parts[REPLICA], sum(parts.get(name, 0) for name in away))
    return {name: size for name, size in parts.items() if size}


def _kept(
    config: ml_collections.ConfigDict,
    inputs: Inputs,
    num_trained: float | int,
    frozen: Callable[[models.DecoderConfig, str], float | int],
    away: Sequence[str],
) -> dict[str, float | int]:
    """Bytes of what stays during a run: earlier weights, and models that are not trained."""
    parts, base_dtype = {}, config.lora.base_dtype
    if copies := num_earlier(config.rollout):
        dtype = weight_dtype(config) if inputs.lora is None else "float32"
        parts[EARLIER] = copies * width(dtype) * num_trained
    if inputs.lora is not None:
        parts[BASE] = frozen(inputs.policy.config, base_dtype)
        if inputs.critic is not None and inputs.critic_directory is not None:
            parts["base of the critic"] = frozen(inputs.critic.config, base_dtype)
    if "reference" not in away and (held := inputs.held_references):
        dtype = config.model.reference_dtype
        parts[REFERENCE] = sum(frozen(each.config, dtype) for each in held)
    if inputs.reward_model is not None:
        model = inputs.reward_model.model.config
        parts["reward model"] = frozen(model, config.rewards.model.dtype)
    return parts


def least_parts_sft(
    config: ml_collections.ConfigDict, policy: models.Policy, lora: models.Lora | None, mesh: Mesh
) -> dict[str, float | int]:
    """See `least_parts`; here for a supervised fine-tuning."""
    sizes = _Sizes(config, mesh, lora)
    parts = sizes.of_update("training", policy)
    if lora is not None:
        parts[BASE] = sizes.frozen(policy.config, config.lora.base_dtype)
    return parts


class _Sizes:
    """Sizes of models on one device, or on all of this process if they share a memory."""

    def __init__(
        self, config: ml_collections.ConfigDict, mesh: Mesh, lora: models.Lora | None
    ) -> None:
        self._config, self._mesh, self._lora = config, mesh, lora
        self.num_devices = len(mesh.local_devices) if is_machine(mesh) else 1
        # What is in another memory than the devices'.
        self.away = () if is_machine(mesh) else tuple(config.training.offload)

    def of_update(
        self, name: str, model: models.Policy | models.ValueModel, with_gradients: bool = True
    ) -> dict[str, float | int]:
        """What an update of a model holds, but for activations; or what remains between updates."""
        per = per_parameter(self._config, name, model, self._lora)
        count = num_trained(model.config, self._lora, self._mesh) * self.num_devices
        parts = {ADAPTERS if self._lora is not None else PARAMETERS: per.parameter * count}
        if "optimizer" not in self.away:
            parts[self._config.optimizer.name] = per.state * count
        if with_gradients:
            # Whole, because their norm decides about the step. Their float32 sum may be the same.
            parts[GRADIENTS] = per.parameter * count
        return parts

    def frozen(self, architecture: models.DecoderConfig, dtype: str) -> float | int:
        """Parameters that are not trained: devices of one machine may share one copy."""
        count = num_parameters(architecture, self._mesh) * self.num_devices
        return width(dtype) * min(count, num_parameters(architecture))


def update_sizes(
    config: ml_collections.ConfigDict, inputs: Inputs, mesh: Mesh
) -> dict[str, float | int]:
    """Bytes of one device in an update of the policy, by what takes them; estimates."""
    training, rollout = config.training, config.rollout
    length = rollout.max_prompt_tokens + rollout.max_response_tokens
    rows = training.micro_batch_size / math.prod(mesh.shape[axis] for axis in models.DATA_AXES)
    if training.micro_batch_tokens:
        rows = training.micro_batch_tokens / length
    per = per_parameter(config, "training", inputs.policy, inputs.lora)
    trained = num_trained(inputs.policy.config, inputs.lora, mesh)
    return {
        PARAMETERS if inputs.lora is None else ADAPTERS: per.parameter * trained,
        config.optimizer.name: per.state * trained,
        GRADIENTS: per.gradients * trained,
    } | update_parts(
        inputs.policy.config,
        config.model.remat,
        num_rows=rows,
        num_columns=length / mesh.shape["sequence"],
        num_slots=rows * rollout.max_response_tokens,
        platform=platform_of(mesh),
        dtype=config.model.compute_dtype,
        fsdp=mesh.shape["fsdp"],
        tensor=mesh.shape["tensor"],
        expert=mesh.shape["expert"],
    )


def memory_parts(
    config: ml_collections.ConfigDict, inputs: Inputs, mesh: Mesh
) -> Mapping[str, float | int]:
    """Bytes of one device by what takes them; estimates, see docs/memory.md."""
    architecture, training, rollout = inputs.policy.config, config.training, config.rollout
    parts = {UPDATE: sum(update_sizes(config, inputs, mesh).values())}
    parts |= _kept(
        config,
        inputs,
        num_trained(architecture, inputs.lora, mesh),
        lambda model, dtype: width(dtype) * num_parameters(model, mesh),
        () if is_machine(mesh) else training.offload,  # of a machine, in the same memory
    )
    if inputs.critic is not None:
        per = per_parameter(config, "critic", inputs.critic, inputs.lora)
        parts["critic"] = per.in_update * num_trained(inputs.critic.config, inputs.lora, mesh)
    if is_embedded(config):
        first, *_ = devices = list(mesh.devices.flat)
        own = [device for device in devices if device.process_index == first.process_index]
        engine = configured_mesh(config, architecture, own)
        size = width(weight_dtype(config)) * num_parameters(architecture)
        keys = 2 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim
        shards = engine.size // engine.shape["tensor"]
        prompts, group = rows_of_slots(rollout, training.responses_per_step, shards)
        # The prompt of a branch ends with its prefix.
        of_prompt = longest_prompt(config) if rollout.branching else rollout.max_prompt_tokens
        columns = prompts * (of_prompt + group * rollout.max_response_tokens)
        parts[REPLICA] = size / engine.shape["tensor"]
        number = width(config.model.compute_dtype)
        parts[CACHE] = number * keys * columns / shards / cache_parts(architecture, engine)
    return parts


def cache_parts(architecture: models.DecoderConfig, engine: Mesh) -> int:
    """How many devices share a cache of the JAX engine: heads that do not divide stay whole."""
    tensor = engine.shape["tensor"]
    return 1 if architecture.num_kv_heads % tensor else tensor


def peak_parts(
    config: ml_collections.ConfigDict, inputs: Inputs, mesh: Mesh
) -> dict[str, float | int]:
    """`memory_parts` that exist at the same time.

    Without a lag, a replica of this process has its weights and its cache only between updates; in
    turns, with the parameters alone.
    """
    parts = dict(memory_parts(config, inputs, mesh))
    if not num_earlier(config.rollout):
        sizes = update_sizes(config, inputs, mesh)
        left = sum(sizes.values()) - sum(
            sizes.get(name, 0) for name in (PARAMETERS, ADAPTERS, config.optimizer.name)
        )
        if config.rollout.in_turns and not is_machine(mesh):
            left = sum(parts.values()) - sum(map(sizes.get, sizes.keys() & {PARAMETERS, ADAPTERS}))
            left -= sum(parts.get(name, 0) for name in (BASE, REPLICA, CACHE))
        for name in filter(parts.get, (REPLICA, CACHE)):
            shared = min(left, parts[name])
            parts[name], left = parts[name] - shared, left - shared
    return {name: size for name, size in parts.items() if size}


@functools.cache
def num_parameters(architecture: models.DecoderConfig, mesh: Mesh | None = None) -> int:
    """Numbers in all weights, or in those of one device."""
    return models.num_parameters(architecture, {} if mesh is None else mesh.shape)


def per_parameter(
    config: ml_collections.ConfigDict,
    name: str,
    model: models.Policy | models.ValueModel,
    lora: models.Lora | None,
) -> PerParameter:
    shapes = model.shapes() if lora is None else lora.trained_shapes(model.shapes())
    return PerParameter.of(optimizer_of(config, name), shapes)


def num_trained(
    architecture: models.DecoderConfig, lora: models.Lora | None, mesh: Mesh | None = None
) -> float | int:
    """Numbers that are trained, in all or on one device."""
    if lora is None:
        return num_parameters(architecture, mesh)
    shards = 1 if mesh is None else mesh.shape["fsdp"] * mesh.shape["tensor"]
    return models.peft.num_parameters(architecture, lora) / shards


def is_machine(mesh: Mesh) -> bool:
    """Whether the devices are cores, which share the memory of the machine."""
    return platform_of(mesh) == "cpu"


def device_bytes() -> int | None:
    """Memory of a device that arrays may take; None if the device does not tell it."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def width(dtype: str) -> int:
    """Bytes of a number."""
    return 2 if dtype == "bfloat16" else 4


def size_text(num_bytes: float | int) -> str:
    """A size as text, such as 3.2 GiB or 5.1 MiB."""
    power = 4 if num_bytes >= 1000 * 2**30 else 3 if num_bytes >= 2**30 else 2
    return f"{num_bytes / 1024**power:.3g} {'MGT'[power - 2]}iB"
