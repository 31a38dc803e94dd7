"""A plan: what the programs of a run need on a slice, and the time they would take there."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections

from semrl_jax import models
from semrl_jax.algorithms.algorithm import load_algorithm
from semrl_jax.planning import hlo, roofline
from semrl_jax.planning.architectures import find_architecture
from semrl_jax.planning.chips import Slice, find_slice, smallest_that_holds
from semrl_jax.planning.programs import (
    Compiled,
    Programs,
    check_compiler,
    engine_mesh,
    lora_of,
    trainer_mesh,
)
from semrl_jax.runs.config import validate
from semrl_jax.runs.memory import num_parameters
from semrl_jax.runs.setup import check_context, check_micro_batches
from semrl_jax.sampling.replicas import is_embedded
from semrl_jax.support.errors import UserError
from semrl_jax.training.memory import update_bytes
from semrl_jax.training.plan import UPDATE

STATE_BYTES_PER_PARAMETER = 16  # parameter, two Adam moments, sum of gradients
KEPT = ("parameters", "optimiser", "reference", "base", "engine weights")  # between programs, too


class ProgramPlan(NamedTuple):
    """What one program needs and takes.

    Attributes:
      compiled: memory and text.
      program: what it executes; None if it does not fit.
      times: its roofline; None if it does not fit.
      runs: executions in one training step.
      flops: of one chip and one run, by the closed form: what the algorithm needs.
      mesh: of the program; the engine has its own.
    """

    compiled: Compiled
    program: hlo.Program | None
    times: roofline.Times | None
    runs: float | int
    flops: float | int
    mesh: Mapping[str, int]

    def mfu(self, peak: float | int) -> float | int:
        """Share of the chips' peak that the needed products take."""
        return self.flops / self.times.total / peak


class Plan(NamedTuple):
    """A config on a slice.

    Attributes:
      slice_: where.
      mesh: sizes by axis.
      settings: remat and size of a micro-batch.
      num_parameters: of the policy.
      programs: by name.
      capacity: bytes of HBM of a chip.
      advice: what to change; empty if it fits.
      held: bytes of a chip beside all programs, by kind.
    """

    slice_: Slice
    mesh: Mapping[str, int]
    settings: Mapping[str, Any]
    num_parameters: int
    programs: Mapping[str, ProgramPlan]
    capacity: float | int
    advice: Sequence[str]
    held: Mapping[str, int] = {}

    @property
    def peak_bytes(self) -> float | int:
        """Bytes of a chip: what is kept, and what the largest program adds."""
        kept = dict(self.held)
        for part in self.programs.values():
            kept |= {k: v for k, v in part.compiled.arguments.items() if k in KEPT}
        return max(
            part.compiled.total
            + sum(size for kind, size in kept.items() if kind not in part.compiled.arguments)
            for part in self.programs.values()
        )

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.capacity

    @property
    def step(self) -> roofline.Times | None:
        """One training step, without sampling; None if a program does not fit."""
        own = [part for name, part in self.programs.items() if name != "decode"]
        if any(part.times is None for part in own):
            return None
        total = roofline.Times(0, 0, 0, 0, 0)
        for part in own:
            total += part.times.times(part.runs)
        return total

    def as_json(self) -> dict[str, Any]:
        """One object of plain values."""
        step, update = self.step, self.programs["update"]
        return {
            "topology": self.slice_.name,
            "chips": self.slice_.num_chips,
            "mesh": dict(self.mesh),
            **self.settings,
            "parameters": self.num_parameters,
            "fits": self.fits,
            "hbm_bytes": self.capacity,
            "peak_bytes": self.peak_bytes,
            "held_bytes": dict(self.held),
            "step_s": step and step.total,
            "update_mfu": update.times and update.mfu(self.slice_.chip.flops),
            "bound": update.times and update.times.bound,
            "advice": list(self.advice),
            "programs": {name: self._of(part) for name, part in self.programs.items()},
        }

    def _of(self, part: ProgramPlan) -> dict[str, Any]:
        compiled = part.compiled
        found: dict[str, Any] = {
            "runs": part.runs,
            "bytes": {
                **compiled.arguments,
                "temporary": compiled.temporary,
                "output": compiled.output,
                "code": compiled.code,
                "total": compiled.total,
            },
            "needed_flops": part.flops,
            "compiler_options": dict(compiled.options),
        }
        if part.program is None:
            return found
        return found | {
            "flops": part.program.dot_flops,
            "hbm_traffic_bytes": part.program.hbm_bytes,
            "times_s": part.times._asdict() | {"total": part.times.total},
            "bound": part.times.bound,
            "collectives": [
                {"kind": kind, "axes": axes, "times": times, "sent_bytes": sent}
                for (kind, axes), (times, sent) in hlo.by_kind_and_axis(
                    part.program.collectives, part.mesh
                ).items()
            ],
        }


def check(config: ml_collections.ConfigDict, topology: str) -> tuple[Slice, models.DecoderConfig]:
    """Finds every mistake that needs no compiler.

    Raises:
      UserError: for an unknown topology, a wrong config, or a model larger than the slice.
    """
    where = find_slice(topology)
    validate(config)
    if not config.model.path:
        raise UserError(
            "model.path is empty: a plan needs a model; set --config.model.path=Qwen/Qwen2.5-7B."
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
    check_compiler()
    needed = state_bytes(config, architecture)
    if needed > where.hbm_bytes:
        holds = smallest_that_holds(needed)
        fitting = f"it fits into {' or '.join(holds)}" if holds else "no slice holds it"
        raise UserError(
            f"--topology={where.name} has {_gib(where.hbm_bytes)} of memory, and the state of "
            f"{config.model.path} takes {_gib(needed)}; {fitting}, if its mesh splits everything."
        )
    return where, architecture


def state_bytes(
    config: ml_collections.ConfigDict, architecture: models.DecoderConfig
) -> float | int:
    """Bytes of all chips: what is trained, and the frozen base of adapters."""
    lora, count = lora_of(config, architecture), num_parameters(architecture)
    if lora is None:
        return STATE_BYTES_PER_PARAMETER * count
    base = (2 if config.lora.base_dtype == "bfloat16" else 4) * count
    return base + STATE_BYTES_PER_PARAMETER * models.peft.num_parameters(architecture, lora)


def make_plan(
    config: ml_collections.ConfigDict,
    where: Slice,
    architecture: models.DecoderConfig,
    progress: Callable[[str], None],
    names: Sequence[str] = ("update", "pass", "decode"),
) -> Plan:
    """Compiles the programs and reads them.

    Args:
      config: checked by `check`.
      progress: is told what is compiled.
      names: of programs; those that the run does not have are left out.

    Raises:
      UserError: if the mesh fits neither the slice nor the model.
    """
    mesh = trainer_mesh(config, where)
    models.check_mesh(architecture, mesh)
    check_micro_batches("training", config.training, mesh)
    programs = Programs(config, architecture, where, mesh)
    makers = {"update": programs.update}
    if programs.passes.has_pass:
        makers["pass"] = programs.logprobs
    if is_embedded(config):
        makers["decode"] = programs.decode
    found = {}
    for name in names:
        if name in makers:
            progress(f"compiling {name} for {where.name}")
            found[name] = _planned(makers[name](), programs)
    plan = Plan(
        where,
        dict(mesh.shape),
        {"remat": config.model.remat, "micro_batch_size": _rows(config)},
        num_parameters(architecture),
        found,
        where.chip.hbm_bytes,
        (),
        programs.held(),
    )
    return plan if plan.fits else plan._replace(advice=advice(config, plan))


def _rows(config: ml_collections.ConfigDict) -> int | str:
    training = config.training
    if training.micro_batch_tokens:
        return f"{training.micro_batch_tokens} tokens per data shard"
    return training.micro_batch_size


def _planned(compiled: Compiled, programs: Programs) -> ProgramPlan:
    where, rollout = programs.slice_, programs.config.rollout
    mesh = programs.mesh
    if compiled.name == "decode":
        mesh = engine_mesh(programs)
        count = min(rollout.jax_max_batch, programs.config.training.responses_per_step)
        tokens = count * compiled.passes
        columns = rollout.max_prompt_tokens + rollout.max_response_tokens
        # A token attends to half of the columns of the whole response, as in a causal pass.
        flops = (
            roofline.products(
                programs.architecture, num_tokens=tokens, num_columns=columns, num_slots=tokens
            ).forward
            / mesh.size
        )
        runs = rollout.max_response_tokens / compiled.passes
    else:
        layout = programs.layout()
        tokens = layout.shard_tokens.sum()
        needed = roofline.products(
            programs.architecture,
            num_tokens=tokens,
            num_columns=rollout.max_prompt_tokens + rollout.max_response_tokens,
            num_slots=(layout.slots >= 0).sum(),
            num_adapters=num_adapters(programs.config, programs.architecture),
        )
        flops = needed.forward
        if compiled.name == "update":
            flops = needed.training
            if programs.passes.reference == UPDATE:
                flops += needed.forward - needed.adapters
        flops /= where.num_chips
        runs = programs.num_updates
    if not compiled.text:
        return ProgramPlan(compiled, None, None, runs, flops, mesh.shape)
    program = hlo.read(compiled.text, passes=compiled.passes)
    places = [tuple(device.coords) for device in mesh.devices.flat]
    times = roofline.times(program, where, places)
    return ProgramPlan(compiled, program, times, runs, flops, mesh.shape)


def num_adapters(config: ml_collections.ConfigDict, architecture: models.DecoderConfig) -> int:
    """Parameters of adapters; 0 if all parameters are trained."""
    lora = lora_of(config, architecture)
    return 0 if lora is None else models.peft.num_parameters(architecture, lora)


def advice(config: ml_collections.ConfigDict, plan: Plan) -> list[str]:
    """What makes it smaller, by the size of what it reduces."""
    update, found = plan.programs["update"].compiled, []
    state = sum(update.arguments.get(kind, 0) for kind in ("parameters", "optimiser"))
    if plan.mesh["replica"] > 1:
        found.append(f"mesh.replica=1: the state ({_gib(state)} per chip) is then split further")
    if config.training.micro_batch_tokens or plan.mesh["fsdp"] * plan.mesh["replica"] < (
        config.training.micro_batch_size
    ):
        found.append("a smaller training.micro_batch_size or micro_batch_tokens: fewer activations")
    if config.model.remat != "full":
        found.append("model.remat=full: the backward pass computes activations again")
    if update.arguments.get("reference") and config.model.reference_dtype == "float32":
        found.append("model.reference_dtype=bfloat16: half of the reference")
    if "base" in update.arguments and config.lora.base_dtype == "float32":
        found.append("lora.base_dtype=bfloat16: half of the frozen base")
    if plan.mesh["tensor"] == 1:
        found.append("mesh.tensor=2: half of the activations of heads and features")
    if "decode" in plan.programs and config.rollout.jax_tensor_parallelism == 1:
        found.append("rollout.jax_tensor_parallelism=-1: the engine's weights are split")
    larger = smallest_that_holds(2 * plan.slice_.hbm_bytes)
    return [*found, f"a larger slice: {' or '.join(larger)}"] if larger else found


class Candidate(NamedTuple):
    """A mesh and settings with their estimates from closed forms, before anything is compiled."""

    mesh: Mapping[str, int]
    remat: str
    micro_batch_size: int
    num_bytes: float | int
    seconds: float | int

    def put_into(self, config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
        """A copy of the config with these values."""
        config = config.copy_and_resolve_references()
        for axis, size in self.mesh.items():
            config.mesh[axis] = size
        config.model.remat = self.remat
        config.training.micro_batch_size = self.micro_batch_size
        config.training.micro_batch_tokens = 0
        config.training.pack_sequences = False
        return config


def candidates(
    config: ml_collections.ConfigDict, where: Slice, architecture: models.DecoderConfig
) -> list[Candidate]:
    """All meshes, remat policies and micro-batches that the model permits, best estimate first."""
    found = []
    for mesh in _meshes(where.num_chips, architecture):
        shards = mesh["replica"] * mesh["fsdp"]
        responses = config.training.prompts_per_minibatch * config.rollout.group_size
        for remat, rows in itertools.product(models.REMAT_POLICIES, (1, 2, 4, 8)):
            if rows * shards <= max(responses, shards):
                found.append(_estimate(config, where, architecture, mesh, remat, rows))
    fitting = [one for one in found if one.num_bytes <= where.chip.hbm_bytes]
    return sorted(fitting, key=lambda one: one.seconds)


def _meshes(num_chips: int, architecture: models.DecoderConfig) -> Iterator[Mapping[str, int]]:
    heads = architecture.num_heads * architecture.head_dim
    experts, inner = architecture.experts, [architecture.intermediate_size]
    if experts is not None:
        inner = inner if experts.dense_layers else []
        inner.append(experts.intermediate_size)
    for tensor, replica in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64)):
        fsdp, rest = divmod(num_chips, tensor * replica)
        if rest or not fsdp:
            continue
        keys = architecture.num_kv_heads * architecture.head_dim
        by_tensor = (architecture.num_heads, heads, keys, *inner)
        sizes = architecture.hidden_size, heads // tensor, *(size // tensor for size in inner)
        if any(size % tensor for size in (*by_tensor, architecture.vocab_size)):
            continue
        if not any(size % fsdp for size in sizes):
            yield {"replica": replica, "fsdp": fsdp, "sequence": 1, "tensor": tensor, "expert": 1}


def _estimate(config, where, architecture, mesh, remat, rows) -> Candidate:
    rollout, chip = config.rollout, where.chip
    length = rollout.max_prompt_tokens + rollout.max_response_tokens
    shards, tensor = mesh["replica"] * mesh["fsdp"], mesh["tensor"]
    responses = config.training.prompts_per_minibatch * rollout.group_size
    num_micro = -(-responses // (rows * shards))
    trained = num_adapters(config, architecture)
    count = (trained or num_parameters(architecture)) / (mesh["fsdp"] * tensor)
    width = 2 if config.model.compute_dtype == "bfloat16" else 4
    state = state_bytes(config, architecture) / (mesh["fsdp"] * tensor)
    # Activations and logits of the estimate for float32, without its parameters.
    slots = rows * rollout.max_response_tokens
    activations = update_bytes(
        architecture, remat, 0, num_rows=rows, num_columns=length, num_slots=0, platform="tpu"
    )
    activations *= width / 4 / tensor
    # A layer, and the output matrix with its gradient, as they are gathered.
    layer = width * roofline.layer_parameters(architecture) / tensor
    matrix = width * architecture.hidden_size * architecture.vocab_size / tensor
    num_bytes = state + activations + 3 * layer + 3 * matrix
    needed = roofline.products(
        architecture,
        num_tokens=rows * length,
        num_columns=length,
        num_slots=slots,
        num_adapters=trained,
    )
    again = {"none": 0.0, "dots": 0.1, "full": 1.0}[remat]
    compute = (needed.training + again * needed.forward) / tensor / chip.flops
    links = chip.num_links * chip.link_bandwidth
    gathered = 0.0
    if mesh["fsdp"] > 1:
        gathered = 3 * (architecture.num_layers * layer + matrix) * (1 - 1 / mesh["fsdp"])
    states = width * rows * length * architecture.hidden_size * architecture.num_layers
    summed = 2 * (1 - 1 / tensor) * states * (4 + 2 * (remat == "full"))
    # Added: without flags of its own, the compiler overlaps little of it.
    seconds = num_micro * (compute + (gathered + summed) / links)
    if mesh["replica"] > 1:
        seconds += 2 * 4 * count / links
    return Candidate(mesh, remat, rows * shards, num_bytes, seconds)


def search(
    config: ml_collections.ConfigDict,
    where: Slice,
    architecture: models.DecoderConfig,
    count: int,
    progress: Callable[[str], None],
) -> list[Plan]:
    """Compiles the update of the candidates with the best estimates; the fastest that fits first.

    Raises:
      UserError: if no candidate is estimated to fit.
    """
    found = candidates(config, where, architecture)
    # Of each mesh and policy, the best micro-batch: the others would differ little.
    best = {(*one.mesh.values(), one.remat): one for one in reversed(found)}
    found = sorted(best.values(), key=lambda one: one.seconds)
    if not found:
        raise UserError(
            f"--search: no mesh of --topology={where.name} is estimated to hold "
            f"{config.model.path}; choose a larger slice."
        )
    progress(f"{len(found)} candidates are estimated to fit; compiling the best {count}")
    plans = [
        make_plan(one.put_into(config), where, architecture, progress, names=("update",))
        for one in found[:count]
    ]
    return sorted(plans, key=lambda plan: plan.step.total if plan.step else math.inf)


def on_chips(
    program: hlo.Program, mesh: Mapping[str, int], larger: Mapping[str, int]
) -> hlo.Program:
    """The same work of a chip, with the collectives of a mesh of other sizes.

    Gathered layers have the same size on every mesh, and their gradients' parts are divided by
    `fsdp`. With replicas, each part is summed over them. The gradient of the embedding, whose parts
    are summed too, is left out.
    """
    found = []
    for one in program.collectives:
        axes, arrays = one.axes(mesh), one.arrays
        members = _members_along(axes, larger)
        if one.kind == "reduce-scatter":
            scale = len(one.members) / len(members)
            arrays = tuple(
                (dtype, (math.ceil(math.prod(shape) * scale),)) for dtype, shape in arrays
            )
        moved = dataclasses.replace(one, arrays=arrays, group=len(members), members=members)
        if len(members) > 1:
            found.append(moved)
        if one.kind == "reduce-scatter" and larger["replica"] > mesh["replica"] == 1:
            members = _members_along(("replica",), larger)
            found.append(
                dataclasses.replace(moved, kind="all-reduce", group=len(members), members=members)
            )
    return hlo.Program(tuple(found), program.work)


def _members_along(axes: Sequence[str], mesh: Mapping[str, int]) -> tuple[int, ...]:
    """The devices of the group of device 0 along the axes."""
    sizes = list(mesh.values())
    strides = {axis: math.prod(sizes[index + 1 :]) for index, axis in enumerate(mesh)}
    members = [0]
    for axis in axes:
        members = [m + strides[axis] * i for m in members for i in range(mesh[axis])]
    return tuple(members)


def _gib(num_bytes: float | int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
