"""A plan: what the programs of a run need on a slice, and the time they would take there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections

from semrl_jax import models
from semrl_jax.algorithms.algorithm import load_algorithm
from semrl_jax.models.of_config import lora_of
from semrl_jax.planning import hlo, roofline
from semrl_jax.planning.architectures import find_architecture
from semrl_jax.planning.chips import Slice, find_slice, smallest_that_holds
from semrl_jax.planning.programs import Compiled, Programs, check_compiler, devices_of
from semrl_jax.runs.config import validate
from semrl_jax.runs.memory import num_parameters, num_trained, per_parameter, size_text, width
from semrl_jax.runs.setup import check_context, check_micro_batches
from semrl_jax.sampling.replicas import is_embedded
from semrl_jax.support.errors import UserError
from semrl_jax.training.plan import UPDATE

KEPT = ("parameters", "optimiser", "reference", "base", "engine weights")  # between programs, too


class ProgramPlan(NamedTuple):
    """What one program needs and takes.

    Attributes:
      compiled: memory and text.
      program: what it executes; None if it does not fit.
      times: its roofline; None if it does not fit.
      runs: executions in one training step.
      flops: of one chip and one run, by the closed form: what the algorithm needs.
    """

    compiled: Compiled
    program: hlo.Program | None
    times: roofline.Times | None
    runs: float | int
    flops: float | int

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
      advice: what to change; empty if it fits.
      held: bytes of a chip that stay and that no program takes, by kind.
    """

    slice_: Slice
    mesh: Mapping[str, int]
    settings: Mapping[str, Any]
    num_parameters: int
    programs: Mapping[str, ProgramPlan]
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
        return self.peak_bytes <= self.slice_.chip.hbm_bytes

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
            "hbm_bytes": self.slice_.chip.hbm_bytes,
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
                    part.program.collectives, compiled.mesh.shape
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
            f"--topology={where.name} has {size_text(where.hbm_bytes)} of memory, and the state of "
            f"{config.model.path} takes {size_text(needed)}; {fitting}, if its mesh splits "
            "everything."
        )
    return where, architecture


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
) -> Plan:
    """Compiles the programs and reads them.

    Args:
      config: checked by `check`.
      progress: is told what is compiled.
      names: of programs; those that the run does not have are left out.

    Raises:
      UserError: if the mesh fits neither the slice nor the model.
    """
    mesh = models.make_mesh(config.mesh.to_dict(), devices_of(where))
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
    settings = {"remat": config.model.remat, "micro_batch_size": _rows(config)}
    count = num_parameters(architecture)
    plan = Plan(where, dict(mesh.shape), settings, count, found, (), programs.held())
    return plan if plan.fits else plan._replace(advice=advice(config, plan))


def _rows(config: ml_collections.ConfigDict) -> int | str:
    training = config.training
    if training.micro_batch_tokens:
        return f"{training.micro_batch_tokens} tokens per data shard"
    return training.micro_batch_size


def _planned(compiled: Compiled, programs: Programs) -> ProgramPlan:
    """Reads a program, and says what the algorithm needs of it by the closed form."""
    rollout, mesh, adapters = programs.config.rollout, compiled.mesh, 0
    if compiled.name == "decode":
        count = min(rollout.jax_max_batch, programs.config.training.responses_per_step)
        tokens = slots = count * compiled.passes
        runs = rollout.max_response_tokens / compiled.passes
    else:
        layout = programs.layout()
        tokens, slots = layout.shard_tokens.sum(), (layout.slots >= 0).sum()
        runs = programs.num_updates
        if programs.lora is not None:
            adapters = models.peft.num_parameters(programs.architecture, programs.lora)
    needed = roofline.products(
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
        if programs.passes.reference == UPDATE:
            flops += needed.forward - needed.adapters
    program = times = None
    if compiled.text:
        program = hlo.read(compiled.text, passes=compiled.passes)
        places = [tuple(device.coords) for device in mesh.devices.flat]
        times = roofline.times(program, programs.slice_, places)
    return ProgramPlan(compiled, program, times, runs, flops / mesh.size)


def advice(config: ml_collections.ConfigDict, plan: Plan) -> list[str]:
    """What makes it smaller, by the size of what it reduces."""
    update, mesh = plan.programs["update"].compiled.arguments, plan.mesh
    state = size_text(sum(update.get(kind, 0) for kind in ("parameters", "optimiser")))
    are_rows_left = mesh["fsdp"] * mesh["replica"] < config.training.micro_batch_size
    larger = smallest_that_holds(2 * plan.slice_.hbm_bytes)
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
            "decode" in plan.programs and config.rollout.jax_tensor_parallelism == 1
        ),
        f"a larger slice: {' or '.join(larger)}": larger,
    }
    return [way for way, helps in ways.items() if helps]
