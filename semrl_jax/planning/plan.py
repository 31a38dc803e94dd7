"""A plan: what the programs of a run need on a slice, and the time they would take there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def _gib(num_bytes: float | int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
