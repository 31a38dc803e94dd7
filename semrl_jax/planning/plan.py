"""A plan: what the programs of a run need on a slice, and the time they would take there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections

from semrl_jax import models
from semrl_jax.algorithms.algorithm import load_algorithm
from semrl_jax.models.of_config import lora_of
from semrl_jax.models.products import products
from semrl_jax.planning import hlo, roofline
from semrl_jax.planning.architectures import find_architecture
from semrl_jax.planning.slice_programs import Compiled, Programs, check_compiler, devices_of
from semrl_jax.runs.config_checks import validate
from semrl_jax.runs.memory import num_parameters, num_trained, per_parameter, size_text, width
from semrl_jax.runs.setup import check_context, check_micro_batches
from semrl_jax.sampling.replicas import is_embedded
from semrl_jax.settings.model import reference_models
from semrl_jax.settings.training import updates_per_step
from semrl_jax.support.chips import Cluster, Slice, find_cluster, find_slice, smallest_that_holds
from semrl_jax.support.errors import UserError
from semrl_jax.training.passes import UPDATE

KEPT = ("parameters", "optimiser", "reference", "base")  # between programs, too


def check(
    config: ml_collections.ConfigDict, topology: str, compiles: bool = True
) -> tuple[Slice | Cluster, models.DecoderConfig]:
    """Finds every mistake that needs no compiler; UserError."""
    where = find_cluster(topology) or find_slice(topology)
    validate(config)
    if not config.model.path:
        raise UserError("model.path is empty; set it, as --config.model.path=Qwen/Qwen2.5-7B.")
    for named in reference_models(config.model).values():
        raise UserError(
            f"{named.field}={named.path!r}: launch.plan knows only a "
            "reference that is the policy at the start; remove it to plan the rest."
        )
    algorithm = load_algorithm(config.algorithms.to_dict())
    if algorithm.needs.values or config.rewards.model.path:
        what = "critic" if algorithm.needs.values else "reward model"
        way_out = "choose an algorithm without one" if what == "critic" else "take it out"
        raise UserError(
            f"algorithms.name={config.algorithms.name!r}, rewards.model.path="
            f"{config.rewards.model.path!r}: launch.plan knows the policy and its reference, and "
            f"no {what}; {way_out} to plan the rest."
        )
    architecture = find_architecture(config.model.path, config.model.family)
    check_context(config, architecture)
    lora_of(config, architecture)
    if compiles and isinstance(where, Slice):
        check_compiler()
    needed = state_bytes(config, architecture)
    if needed > where.hbm_bytes:
        holds = larger_ones(where, needed)
        fitting = f"it fits into {' or '.join(holds)}" if holds else "no slice holds it"
        raise UserError(
            f"--topology={where.name} has {size_text(where.hbm_bytes)} of memory, and the state of "
            f"{config.model.path} takes {size_text(needed)}; {fitting}, if its mesh splits all."
        )
    return where, architecture


def larger_ones(where: Slice | Cluster, num_bytes: float | int) -> list[str]:
    """Slices, or a cluster of the same nodes, with so much memory."""
    if isinstance(where, Slice):
        return smallest_that_holds(num_bytes)
    nodes = math.ceil(num_bytes / (where.per_node * where.chip.hbm_bytes))
    return [where._replace(nodes=nodes).name]


def state_bytes(
    config: ml_collections.ConfigDict, architecture: models.DecoderConfig
) -> float | int:
    """Bytes of all chips: what is trained with its gradients, and the frozen base of adapters."""
    lora = lora_of(config, architecture)
    per = per_parameter(config, "training", models.Policy(architecture), lora)
    state = 0 if "optimizer" in config.training.offload else per.state
    size = (2 * per.parameter + state) * num_trained(architecture, lora)
    if lora is not None:
        size += width(config.lora.base_dtype) * num_parameters(architecture)
    return size


def make_plan(
    config: ml_collections.ConfigDict,
    where: Slice,
    architecture: models.DecoderConfig,
    progress: Callable[[str], None],
    names: Sequence[str] = ("update", "pass", "decode"),
) -> dict[str, Any]:
    """Compiles the programs that `names` and the run have, and reads them.

    Returns one object of plain values, as `launch.plan --json` prints it, of one chip. A program
    that does not fit has no `times_s`. UserError if the mesh fits neither the slice nor the model.
    """
    mesh = models.make_mesh(config.mesh.to_dict(), devices_of(where))
    models.check_mesh(architecture, mesh)
    check_micro_batches("training", config.training, mesh)
    programs, training = Programs(config, architecture, where, mesh), config.training
    makers = {"update": programs.update}
    if programs.learner.plan.has_pass:
        makers["pass"] = programs.logprobs
    if is_embedded(config):
        makers["decode"] = programs.decode
    found = {}
    for name in names:
        if name in makers:
            progress(f"compiling {name} for {where.name}")
            found[name] = _read(makers[name](), programs)
    held, update = programs.held(), found["update"]
    own = [part for name, part in found.items() if name != "decode"]
    fit = all("times_s" in part for part in own)
    peak = peak_bytes(found, held, config.rollout)
    rows = training.micro_batch_size
    if training.micro_batch_tokens:
        rows = f"{training.micro_batch_tokens} tokens per data shard"
    plan = {
        "topology": where.name,
        "accelerator_type": where.accelerator_type,
        "chips": where.num_chips,
        "mesh": dict(mesh.shape),
        "remat": config.model.remat,
        "micro_batch_size": rows,
        "parameters": num_parameters(architecture),
        "fits": peak <= where.chip.hbm_bytes,
        "hbm_bytes": where.chip.hbm_bytes,
        "peak_bytes": peak,
        "held_bytes": held,
        "step_s": sum(part["runs"] * part["times_s"]["total"] for part in own) if fit else None,
        "update_mfu": update.get("mfu"),
        "bound": update.get("bound"),
        "programs": found,
    }
    return plan | {"advice": [] if plan["fits"] else advice(config, plan, where)}


def peak_bytes(
    programs: Mapping[str, Any], held: Mapping[str, int], rollout: Mapping[str, Any]
) -> float | int:
    """Bytes of a chip: what stays between programs, and what the largest program adds.

    An engine that samples ahead has its weights during an update too. One that samples in turns has
    the chip with the parameters that it gets, and with nothing else.
    """
    sizes, kept = {name: part["bytes"] for name, part in programs.items()}, dict(held)
    stays = KEPT + ("engine weights",) * bool(rollout["max_staleness"])
    for own in sizes.values():
        kept |= {kind: size for kind, size in own.items() if kind in stays}

    def held_meanwhile(name: str) -> float | int:
        """Bytes on the device that the program does not use."""
        takes_turn = name == "decode" and rollout["in_turns"]
        kinds = ("parameters", "base") if takes_turn else tuple(kept)
        return sum(kept.get(kind, 0) for kind in kinds if kind not in sizes[name])

    return max(own["total"] + held_meanwhile(name) for name, own in sizes.items())


def _read(compiled: Compiled, programs: Programs) -> dict[str, Any]:
    """What a program needs by the closed form, and what it executes and takes."""
    config, mesh, adapters = programs.config, compiled.mesh, 0
    rollout = config.rollout
    if compiled.name == "decode":
        count = min(rollout.jax_max_batch, config.training.responses_per_step)
        tokens = slots = count * compiled.passes
        runs = rollout.max_response_tokens / compiled.passes
    else:
        layout = programs.layout()
        tokens, slots = int(layout.shard_tokens.sum()), int((layout.slots >= 0).sum())
        runs = updates_per_step(config)
        if compiled.name == "pass":
            runs //= config.training.ppo_epochs
        if (lora := programs.learner.lora) is not None:
            adapters = models.peft.num_parameters(programs.architecture, lora)
    needed = products(
        programs.architecture,
        num_tokens=tokens,
        # A decoded token attends to half of the columns of the whole response, as in a causal pass.
        num_columns=rollout.max_prompt_tokens + rollout.max_response_tokens,
        num_slots=slots,
        num_adapters=adapters,
    )
    flops = needed.forward
    if compiled.name == "update":
        flops = needed.training
        if programs.learner.plan.reference == UPDATE:
            flops += needed.forward - needed.adapters
    flops /= mesh.size
    found: dict[str, Any] = {
        "runs": runs,
        "bytes": dict(compiled.sizes),
        "needed_flops": flops,
        "compiler_options": dict(compiled.options),
    }
    if not compiled.text:
        return found
    program = hlo.read(compiled.text, passes=compiled.passes)
    places = [tuple(device.coords) for device in mesh.devices.flat]
    times = roofline.times(program, programs.slice_, places)
    return found | {
        "flops": program.dot_flops,
        "hbm_traffic_bytes": program.hbm_bytes,
        "times_s": times._asdict() | {"total": times.total},
        "mfu": flops / times.total / programs.slice_.chip.flops,
        "bound": times.bound,
        "collectives": hlo.by_kind_and_axis(program.collectives, mesh.shape),
    }


def advice(
    config: ml_collections.ConfigDict, plan: Mapping[str, Any], where: Slice | Cluster
) -> list[str]:
    """What makes it smaller, by the size of what it reduces."""
    update, mesh = plan["programs"]["update"]["bytes"], plan["mesh"]
    state = size_text(sum(update.get(kind, 0) for kind in ("parameters", "optimiser")))
    are_rows_left = mesh["fsdp"] * mesh["replica"] < config.training.micro_batch_size
    larger = larger_ones(where, 2 * where.hbm_bytes)
    sampled = plan.get("replica") or {"fits": True}
    ways = {
        f"mesh.replica=1: the state ({state} per chip) is then split further": mesh["replica"] > 1,
        "a smaller training.micro_batch_size or micro_batch_tokens: fewer activations": (
            config.training.micro_batch_tokens or are_rows_left
        ),
        "model.remat=full: the backward pass computes activations again": (
            config.model.remat != "full"
        ),
        "model.reference_dtype=bfloat16: half of the reference": (
            update.get("reference") and config.model.reference_dtype == "float32"
        ),
        "lora.base_dtype=bfloat16: half of the frozen base": (
            "base" in update and config.lora.base_dtype == "float32"
        ),
        "mesh.tensor=2: half of the activations of heads and features": mesh["tensor"] == 1,
        "rollout.jax_tensor_parallelism=-1: the engine's weights are split": (
            "decode" in plan["programs"] and config.rollout.jax_tensor_parallelism == 1
        ),
        "rollout.vllm_tensor_parallelism=2: a replica's weights are split": not sampled["fits"],
        "rollout.in_turns=True: the replica sleeps during updates": (
            plan.get("most_of_a_card", 1.0) < 0.9 and not config.rollout.max_staleness
        ),
        f"more devices: {' or '.join(larger)}": larger,
    }
    return [way for way, helps in ways.items() if helps]
