"""The programs of a run, compiled for a TPU slice that is not here.

The compiler is the one that the slice has (libtpu), and the arrays are abstract. The functions are
the ones that a run calls: `update_rows`, `row_logprobs`, `decode_chunk`. No device, weight or
tokenizer is needed.

Source: jax.experimental.topologies, "ahead-of-time compilation for devices that are not attached".
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import re
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import Mesh, NamedSharding

from semrl_jax import models
from semrl_jax.algorithms.algorithm import Passes, load_algorithm
from semrl_jax.cluster.peers import Peers
from semrl_jax.models.of_config import lora_of
from semrl_jax.rollout.building import configured_mesh
from semrl_jax.rollout.engines.decoding import decode_chunk, empty_slots, prompt_columns, slot_specs
from semrl_jax.rollout.engines.sampling import split_sampling
from semrl_jax.runs.setup import optimizer_of
from semrl_jax.settings.rollout import rows_of_slots, weight_dtype
from semrl_jax.support.chips import Slice
from semrl_jax.support.errors import UserError
from semrl_jax.training import offload
from semrl_jax.training.learner import Learner
from semrl_jax.training.packing import Layout, RowPlan, lay_out, row_plan
from semrl_jax.training.passes import PASS, PassPlan
from semrl_jax.training.policy_update import SlotValues, row_logprobs
from semrl_jax.training.train_state import POLICY, abstract_copied, abstract_everywhere, laid_out
from semrl_jax.training.trainee import update_rows
from semrl_jax.types import (
    HiddenStateParams,
    RolloutBatch,
    SamplingParams,
    distribution_of,
    experts_dtype,
)

# Where this pass fails, the program is compiled without it: libtpu 0.0.42 stops ("RET_CHECK failure
# ... user->opcode() == kAdd") if gradients are summed by an all-reduce inside the loop over
# micro-batches. A run needs the same option, in $LIBTPU_INIT_ARGS as --NAME=VALUE.
FAILING_PASS = "while_loop_all_reduce_code_motion"
WITHOUT_IT = {"xla_disable_hlo_passes": FAILING_PASS.replace("_", "-")}
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)  # an argument of a program
ADDED = ("temporary", "output", "code")  # to the arguments
INSTALL = "pip install -e '.[tpu]'"


class Compiled(NamedTuple):
    """One program of the run."""

    name: str  # "update", "pass" or "decode"
    text: str  # scheduled HLO; "" if it does not fit
    # Bytes on one device: each kind of argument, "temporary" for what exists only while it runs,
    # "output" for results that take no argument's place, "code", and "total". If it does not fit,
    # the total is what the compiler names.
    sizes: Mapping[str, float | int]
    passes: int  # of its loop of unknown length: micro-batches, or tokens of a chunk
    mesh: Mesh  # the engine has its own
    options: Mapping[str, str]  # of the compiler, if it needs any


@dataclasses.dataclass(frozen=True)
class Programs:
    """What a checked config compiles, on the mesh of a slice."""

    config: ml_collections.ConfigDict
    architecture: models.DecoderConfig
    slice_: Slice  # where it would run
    mesh: Mesh  # of the trainer

    @property
    def policy(self) -> models.Policy:
        model, mesh = self.config.model, self.mesh
        return models.Policy(
            self.architecture, model.compute_dtype, model.remat, mesh, attention=model.attention
        )

    @functools.cached_property
    def learner(self) -> Learner:
        """What trains in the run; its parameters are abstract."""
        config, mesh, shapes, base = self.config, self.mesh, self.policy.shapes(), None
        algorithm = load_algorithm(config.algorithms.to_dict())
        lora = lora_of(config, self.architecture)
        if lora is not None:
            frozen = abstract_copied(shapes, config.lora.base_dtype, mesh)
            base = models.Base(frozen, abstract_everywhere(np.float32(1), mesh))
        return Learner(
            config=config,
            algorithm=algorithm,
            plan=PassPlan.of(algorithm, config),
            policy=self.policy,
            mesh=mesh,
            reference=abstract_copied(shapes, config.model.reference_dtype, mesh),
            optimizer=optimizer_of(config, "training"),
            pad_token_id=0,
            peers=Peers(),
            device_lock=threading.Lock(),
            lora=lora,
            base=base,
        )

    def held(self) -> Mapping[str, int]:
        """Bytes of a device that no program takes as an argument, and that stay all the time."""
        found, learner = {}, self.learner
        is_away = "reference" in self.config.training.offload
        if learner.plan.reference == PASS and learner.lora is None and not is_away:
            found["reference"] = device_bytes(learner.reference)
        if earlier := learner.abstract_state().earlier:
            found["earlier parameters"] = device_bytes(earlier)
        return found

    def layout(self) -> Layout:
        """The rows of one mini-batch, if all prompts and responses have their greatest length."""
        rollout = self.config.rollout
        count = self.config.training.prompts_per_minibatch * rollout.group_size
        prompt, response = rollout.max_prompt_tokens, rollout.max_response_tokens
        whole = np.ones((count, prompt + response), np.int32)
        groups = np.arange(count)[:, None] // rollout.group_size
        experts = None
        if rollout.router_replay:
            *of_token, num_experts = self.architecture.routed_experts
            experts = np.zeros((*whole.shape, *of_token), experts_dtype(num_experts))
        batch = RolloutBatch(
            token_ids=groups.astype(np.int32) * whole,
            positions=np.broadcast_to(np.arange(prompt + response, dtype=np.int32), whole.shape),
            segment_ids=whole,
            response_mask=np.ones((count, response), bool),
            rollout_logprobs=np.zeros((count, response), np.float32),
            routed_experts=experts,
        )
        return lay_out(batch, self._plan, self.policy.attention_columns, replays=True)

    @property
    def _plan(self) -> RowPlan:
        return row_plan(self.mesh, self.config.training)

    def update(self) -> Compiled:
        """`update_rows`, one optimiser step."""
        layout, sharding, learner = self.layout(), self._plan.sharding, self.learner
        trained, (policy,) = learner.abstract_state().trained(POLICY), learner.trainees
        rows = jax.tree.map(lambda leaf: laid_out(leaf, sharding), layout.rows)
        values = jax.ShapeDtypeStruct(layout.rows.sources.shape, jnp.float32, sharding=sharding)
        ref = values if learner.plan.reference == PASS else None
        old, ref, *_ = learner.plan.given(Passes(values, ref))
        given = SlotValues(old, ref, values if policy.loss.importance else None, values, values)
        settings = {"loss": policy.loss, "optimizer": policy.optimizer, "prefix": policy.name}
        traced = update_rows.trace(*trained, (rows, given), NUMBER, policy.frozen, **settings)
        arguments = {
            "parameters": trained.params,
            "optimiser": trained.optimizer,
            "reference": policy.frozen.reference,
            "base": policy.frozen.base,
            "batch": (rows, given),
        }
        return _compiled("update", traced, arguments, layout.num_micro, self.mesh)

    def logprobs(self) -> Compiled:
        """`row_logprobs`, the pass before the update, over one mini-batch."""
        layout, sharding = self.layout(), self._plan.sharding
        trained, base = self.learner.abstract_state().params, self.learner.base
        params = trained
        if base is not None:
            shapes = jax.eval_shape(models.adapted, trained, base)
            params = jax.tree.map(laid_out, shapes, models.parameter_shardings(shapes, self.mesh))
        rows = jax.tree.map(lambda leaf: laid_out(leaf, sharding), layout.rows)
        traced = row_logprobs.trace(
            params,
            rows,
            NUMBER,
            None,
            policy=self.policy,
            temperature=self.config.rollout.temperature,
            with_states=self.config.hidden_states.source == "policy",
        )
        arguments = {"parameters": trained, "base": base, "batch": rows}
        return _compiled("pass", traced, arguments, layout.num_micro, self.mesh)

    def decode(self) -> Compiled:
        """`decode_chunk` of the JAX engine, with all slots and columns that the config permits."""
        rollout, config = self.config.rollout, self.config
        chips = list(self.mesh.devices.flat)
        host = [chip for chip in chips if chip.process_index == chips[0].process_index]
        mesh = configured_mesh(config, self.architecture, host)
        policy = dataclasses.replace(self.policy, mesh=mesh)
        count = config.training.responses_per_step
        rows, group = rows_of_slots(rollout, count, mesh.shape["replica"])
        sampling = SamplingParams(
            max_tokens=rollout.max_response_tokens, **distribution_of(rollout), eos_token_ids=(0,)
        )
        kind, values = split_sampling(sampling)
        shapes = jax.eval_shape(
            lambda: empty_slots(
                policy=dataclasses.replace(policy, mesh=None),
                rows=rows,
                group=group,
                num_prompt_columns=prompt_columns(rollout.max_prompt_tokens),
                columns=rollout.max_response_tokens,
                counted=sampling.has_penalties,
            )
        )
        layouts = jax.tree.map(lambda spec: NamedSharding(mesh, spec), slot_specs(shapes, mesh))
        slots = jax.tree.map(laid_out, shapes, layouts)
        params = self.engine_params(mesh)
        states = HiddenStateParams(
            layers=(-1,) if config.hidden_states.source == "rollout" else (),
            dtype=config.hidden_states.dtype,
        )
        traced = decode_chunk.trace(
            params,
            slots,
            NUMBER,
            NUMBER,
            values,
            jax.ShapeDtypeStruct((8,), jnp.int32),
            policy=policy,
            kind=kind,
            hidden_states=states,
            num_tokens=rollout.jax_chunk_tokens,
            routed=rollout.router_replay,
        )
        arguments = {"engine weights": params, "cache": slots}
        return _compiled("decode", traced, arguments, rollout.jax_chunk_tokens, mesh)

    def engine_params(self, mesh: Mesh) -> models.Params:
        """The policy as the engine holds it, abstract: single layers on the engine's mesh."""
        unstacked = functools.partial(models.unstacked, config=self.architecture)
        shapes = jax.eval_shape(unstacked, self.policy.shapes())
        return abstract_copied(shapes, weight_dtype(self.config), mesh)


def check_compiler() -> None:
    """Raises UserError if the compiler for TPUs is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"launch.plan needs libtpu, which runs without a TPU: {INSTALL}.")


def devices_of(where: Slice) -> list[Any]:
    """Descriptions of the chips of a slice, none of which is here."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # it would wait for a metadata server
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nobody else's TPU is used
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")  # else it reports that it found none
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", f"{where.chip.name}-8")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
    from jax.experimental import topologies

    # A slice of one chip is a part of a host, which has four chips.
    host = {"chips_per_host_bounds": (1, 1, 1)} if where.num_chips == 1 else {}
    found = topologies.get_topology_desc(platform="tpu", topology_name=where.name, **host)
    return list(found.devices)


def device_bytes(tree: Any) -> int:
    """Bytes of abstract arrays in the memory of one device; what is offloaded is not there."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind != offload.KIND
    )


def _compiled(
    name: str, traced: Any, arguments: Mapping[str, Any], passes: int, mesh: Mesh
) -> Compiled:
    """Compiles, and reads memory and text; a program that is too large has no text."""
    sizes = {kind: device_bytes(tree) for kind, tree in arguments.items() if tree is not None}
    lowered, options = traced.lower(lowering_platforms=("tpu",)), {}
    try:
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if FAILING_PASS not in str(error):
                raise
            options = WITHOUT_IT
            compiled = lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        used = too_large(str(error))
        if used is None:
            raise
        return Compiled(name, "", sizes | {"total": used}, passes, mesh, options)
    memory = compiled.memory_analysis()
    sizes |= {
        "temporary": memory.temp_size_in_bytes,
        "output": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
    }
    parts = (memory.argument_size_in_bytes, *(sizes[kind] for kind in ADDED))
    return Compiled(name, compiled.as_text(), sizes | {"total": sum(parts)}, passes, mesh, options)


def too_large(message: str) -> float | None:
    """The bytes that a program would use, from the compiler's refusal; None: another error."""
    size = r"([\d.]+)([KMGT])"
    found = re.search(rf"Used {size} of [\d.]+[KMGT] hbm|HLO temporaries \({size}\)", message)
    if found is None:
        return None
    number, unit = filter(None, found.groups())
    return float(number) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[unit]
