"""What a run needs by closed forms, without a compiler: for GPUs, or for a slice in a second.

The memory is that of a dry run (`runs.memory`), on a mesh of devices that are not here. A time is
the larger of products at the peak rate and bytes at the bandwidth, so a run is slower. Sizes are
of one device, and all sequences have their greatest length.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import ml_collections
from jax.sharding import Mesh

from semrl_jax import models
from semrl_jax.algorithms.algorithm import load_algorithm
from semrl_jax.models.of_config import lora_of
from semrl_jax.models.products import products
from semrl_jax.planning import roofline
from semrl_jax.planning.plan import advice, peak_bytes
from semrl_jax.rollout.building import configured_mesh
from semrl_jax.runs import memory
from semrl_jax.runs.inputs import Inputs
from semrl_jax.runs.setup import check_micro_batches
from semrl_jax.sampling.replicas import is_embedded
from semrl_jax.settings.rollout import weight_dtype
from semrl_jax.settings.training import updates_per_step
from semrl_jax.support.chips import Cluster, Slice
from semrl_jax.support.errors import UserError
from semrl_jax.training.passes import PASS, UPDATE, PassPlan

MOST_OF_A_CARD = 0.9  # for arrays; the rest is for CUDA and NCCL
MARGIN = 1.15  # compiled updates need up to so much of the formula, see docs/plan.md


@dataclasses.dataclass(frozen=True)
class Absent:
    """A device that is not here, as far as a mesh and `runs.memory` look at it."""

    id: int
    process_index: int
    platform: str


def make_estimate(
    config: ml_collections.ConfigDict,
    where: Cluster | Slice,
    architecture: models.DecoderConfig,
    replica_nodes: int = 0,
) -> dict[str, Any]:
    """The object of `plan.make_plan`, by closed forms, and the replicas on other nodes."""
    is_slice = isinstance(where, Slice)
    if replica_nodes and (is_slice or not 0 < replica_nodes < where.nodes):
        raise UserError(
            f"--replica_nodes={replica_nodes} must be below the nodes of --topology, of GPUs."
        )
    trains = where._replace(nodes=where.nodes - replica_nodes) if replica_nodes else where
    kind = "tpu" if is_slice else "gpu"
    devices = [Absent(i, i // where.per_node, kind) for i in range(trains.num_chips)]
    mesh = models.make_mesh(config.mesh.to_dict(), devices)
    models.check_mesh(architecture, mesh)
    check_micro_batches("training", config.training, mesh)
    algorithm, model = load_algorithm(config.algorithms.to_dict()), config.model
    passes = PassPlan.of(algorithm, config)
    policy = models.Policy(architecture, model.compute_dtype, model.remat)
    fields = {"plan": passes, "policy": policy, "lora": lora_of(config, architecture)}
    fields["references"] = {}
    inputs = Inputs(**dict.fromkeys(Inputs._fields) | fields)
    others = dict(memory.memory_parts(config, inputs, mesh))
    del others[memory.UPDATE]  # the sum of `update_sizes`
    sizes = memory.update_sizes(config, inputs, mesh) | others
    weights, cache = sizes.pop(memory.REPLICA, 0), sizes.pop(memory.CACHE, 0)
    sizes["optimiser"] = sizes.pop(config.optimizer.name)
    programs = _training(config, where, mesh, inputs, sizes)
    replica = _replica(config, where, architecture, mesh, replica_nodes, fields["lora"])
    most = 1.0 if is_slice else MOST_OF_A_CARD
    if replica is not None:
        name = "sample"
        if replica["embedded"]:  # on the devices of the trainer, in turns with it
            name = "decode"
            own = {"engine weights": weights, "cache, or new weights": max(cache, weights)}
            replica["bytes"] = own | {"total": sum(own.values())}
        elif not (replica_nodes or config.rollout.in_turns):  # a child process has some cards
            most = 1 - config.rollout.vllm_gpu_memory_utilization
        programs[name] = replica.pop("program") | {"bytes": replica["bytes"]}
    largest = {n: programs[n] for n in ("update", "decode") if n in programs}
    peak = peak_bytes(largest, {}, config.rollout)
    update, training = programs["update"], config.training
    seconds = {name: part["runs"] * part["times_s"]["total"] for name, part in programs.items()}
    sampling = seconds.pop("sample" if replica_nodes else "", 0.0)
    trainer = sum(seconds.values())
    is_ahead = bool(config.rollout.max_staleness)  # so replicas sample during the updates
    step = max(sampling, trainer) if is_ahead else sampling + trainer
    plan = {
        "topology": where.name,
        "trains_on": trains.name,
        "chips": trains.num_chips,
        "mesh": dict(mesh.shape),
        "remat": model.remat,
        "micro_batch_size": training.micro_batch_size,
        "parameters": memory.num_parameters(architecture),
        "fits": MARGIN * peak <= most * where.chip.hbm_bytes and (not replica or replica["fits"]),
        "hbm_bytes": where.chip.hbm_bytes,
        "peak_bytes": peak,
        "most_of_a_card": most,
        "in_turns": config.rollout.in_turns and not is_embedded(config),  # with a replica's process
        "held_bytes": {},
        "step_s": step,
        "update_mfu": update["mfu"],
        "bound": update["bound"],
        "programs": programs,
        "replica": replica,
    }
    if training.micro_batch_tokens:
        plan["micro_batch_size"] = f"{training.micro_batch_tokens} tokens per data shard"
    return plan | {"advice": [] if plan["fits"] else advice(config, plan, where)}


def _training(
    config: ml_collections.ConfigDict,
    where: Cluster | Slice,
    mesh: Mesh,
    inputs: Inputs,
    sizes: Mapping[str, float | int],
) -> dict[str, Any]:
    """The update of a mini-batch, and the pass before it if the run has one."""
    architecture, rollout, training = inputs.policy.config, config.rollout, config.training
    plan, number = inputs.plan, memory.width(config.model.compute_dtype)
    length = rollout.max_prompt_tokens + rollout.max_response_tokens
    responses = training.prompts_per_minibatch * rollout.group_size
    shards = math.prod(mesh.shape[axis] for axis in models.DATA_AXES)
    rows = training.micro_batch_size
    if training.micro_batch_tokens:
        rows = training.micro_batch_tokens * shards / length
    micro = max(1, math.ceil(responses / rows))
    adapters = 0
    if inputs.lora is not None:
        adapters = models.peft.num_parameters(architecture, inputs.lora)
    needed = products(
        architecture,
        num_tokens=responses * length,
        num_columns=length,
        num_slots=responses * rollout.max_response_tokens,
        num_adapters=adapters,
    )
    of_reference = needed.forward - needed.adapters
    again = needed.head + needed.attention  # logits and scores exist in tiles
    if config.model.remat == "full":
        again += needed.layers
    fsdp, tensor, replica = (mesh.shape[axis] for axis in ("fsdp", "tensor", "replica"))
    kernels = memory.num_parameters(architecture) / tensor
    trained = adapters or kernels
    states = responses * length / shards * architecture.hidden_size * architecture.num_layers
    of_states = 4 * states * number * (1 - 1 / tensor)  # of one pass: two sums in each layer
    gathered = number * kernels * (1 - 1 / fsdp)
    scattered = 4 * trained * (1 - 1 / fsdp)
    summed = 2 * 4 * trained / fsdp * (1 - 1 / replica)
    held = sum(sizes.get(kind, 0) for kind in ("parameters", "adapters", "optimiser", "gradients"))
    references = {kind: int(plan.reference == kind) for kind in (UPDATE, PASS)}
    references[PASS] += plan.own_teacher
    update = _times(
        where,
        mesh.shape,
        needed=needed.training + references[UPDATE] * of_reference,
        executed=needed.training + again + references[UPDATE] * of_reference,
        moved=micro * ((3 + references[UPDATE]) * number * kernels + 2 * sizes["activations"])
        + 2 * held,
        sent={
            "fsdp": micro * ((2 + references[UPDATE]) * gathered + scattered),
            "replica": micro * summed,
            "tensor": 2 * of_states,
        },
    )
    updates = updates_per_step(config)
    found = {"update": update | {"runs": updates, "bytes": sizes | {"total": sum(sizes.values())}}}
    if count := int(plan.has_pass) + references[PASS]:
        forward = int(plan.has_pass) * needed.forward + references[PASS] * of_reference
        sent = {"fsdp": count * micro * gathered, "tensor": count * of_states}
        one = _times(where, mesh.shape, forward, forward, count * micro * number * kernels, sent)
        found["pass"] = one | {"runs": updates // training.ppo_epochs}
    return found


def _times(
    where: Cluster | Slice,
    mesh: Mapping[str, int],
    needed: float | int,
    executed: float | int,
    moved: float | int,
    sent: Mapping[str, float | int],
) -> dict[str, Any]:
    """A program by its operations on all devices, and the bytes that one of them moves and sends.

    In a ring around several nodes, bytes leave a node once for each group of its devices.
    """
    chip, count = where.chip, math.prod(mesh.values())
    inside, leaving, stride = 0.0, 0.0, count
    for axis, size in mesh.items():
        stride //= size
        bytes_, is_far = sent.get(axis, 0.0), stride * size > where.per_node
        if is_far and not isinstance(where, Slice):
            leaving += bytes_ * min(stride, where.per_node)
        else:
            inside += bytes_
    compute, hbm = executed / count / chip.flops, moved / chip.hbm_bandwidth
    # The network between nodes is not known, so only the sending within a node has a time.
    times = roofline.Times(compute, hbm, max(compute, hbm), inside / chip.node_bandwidth, 0.0)
    return {
        "flops": executed / count,
        "needed_flops": needed / count,
        "times_s": times._asdict() | {"total": times.total},
        "mfu": needed / count / times.total / chip.flops,
        "bound": times.bound.replace("ICI", "links"),
        "leaving_bytes": leaving,
        "compiler_options": {},
    }


def _replica(
    config: ml_collections.ConfigDict,
    where: Cluster | Slice,
    architecture: models.DecoderConfig,
    mesh: Mesh,
    replica_nodes: int,
    lora: models.Lora | None,
) -> dict[str, Any] | None:
    """One copy of the weights that samples; None if it is on other machines."""
    rollout, chip = config.rollout, where.chip
    processes = len({device.process_index for device in mesh.devices.flat})
    embedded = is_embedded(config) and not (rollout.addresses_file or replica_nodes)
    number = memory.width(weight_dtype(config))
    if embedded:
        own = [device for device in mesh.devices.flat if device.process_index == 0]
        engine = configured_mesh(config, architecture, own)
        shape, parts = engine.shape, memory.cache_parts(architecture, engine)
        cards, copies = shape["tensor"], processes * shape["replica"]
        most, room = rollout.jax_max_batch // shape["replica"], math.inf
    elif replica_nodes or rollout.engine == "vllm":
        cards, most = rollout.vllm_tensor_parallelism, rollout.vllm_max_num_seqs
        if cards > where.per_node:
            raise UserError(
                f"rollout.vllm_tensor_parallelism={cards} must be at most {where.per_node}."
            )
        copies = replica_nodes * (where.per_node // cards) or processes
        parts = min(cards, architecture.num_kv_heads)
        room = rollout.vllm_gpu_memory_utilization * chip.hbm_bytes
    else:
        return None
    prompt, response = rollout.max_prompt_tokens, rollout.max_response_tokens
    weights = number * memory.num_parameters(architecture) / cards
    heads = architecture.num_kv_heads / parts
    per_token = 2 * number * architecture.num_layers * heads * architecture.head_dim
    per_response = per_token * (prompt + response)
    count = -(-config.training.responses_per_step // copies)
    fitting = min(most, count, (room - weights) / per_response)
    slots = max(1, int(fitting))
    steps = -(-count // slots) * response
    shared = count / rollout.group_size  # prompts, which a group shares
    flops = products(
        architecture, num_tokens=shared * prompt, num_columns=prompt, num_slots=shared
    ).forward
    flops += products(
        architecture,
        num_tokens=count * response,
        num_columns=2 * prompt + response,  # of which a token attends to half, on average
        num_slots=count * response,
    ).forward
    read = weights + slots * (prompt + response / 2) * per_token
    sizes = {"replica weights": weights, "cache": slots * per_response}
    return {
        "embedded": embedded,
        "cards": cards,
        "copies": copies,
        "slots": slots,
        "responses": count,
        "fits": fitting >= 1,
        "bytes": sizes | {"total": sum(sizes.values())},
        # Replicas that stay get the base of adapters once, and then the adapters in float32.
        "weight_bytes": weights * cards
        if lora is None or embedded
        else 4 * models.peft.num_parameters(architecture, lora),
        "program": _times(where, {"tensor": cards}, flops, flops, steps * read, {}) | {"runs": 1},
    }
