"""The replicas a run samples from: given addresses, one embedded here, or a child process."""

from __future__ import annotations

import collections
import contextlib
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_collections
from jax.sharding import Mesh

from semrl_jax import data
from semrl_jax.console import Reporter
from semrl_jax.errors import UserError
from semrl_jax.models import DecoderConfig, Policy, tensor_specs
from semrl_jax.rollout.building import jax_engine, read_token, vllm_child
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.client.embedded import EmbeddedReplica
from semrl_jax.rollout.memory import available_bytes
from semrl_jax.types import ReplicaDescription


@contextlib.contextmanager
def open_client(
    config: ml_collections.ConfigDict,
    policy: Policy,
    tokenizer: Any,
    device_lock: threading.Lock,
    reporter: Reporter,
    *,
    run_id: str,
    attempt_id: str,
    directory: pathlib.Path,
    place: tuple[int, int] = (0, 1),
    num_problems: int = 0,
) -> Iterator[RolloutClient]:
    """A connected client of `rollout.addresses`, or of a replica of its own: `rollout.engine`.

    Args:
      device_lock: held by the embedded replica while it computes.
      run_id, attempt_id: replicas know the run by them.
      directory: of the run; a child process writes its settings and output below it.
      place: (i, n): the i-th of the n processes that sample takes every n-th address.
      num_problems: prompts of one evaluation, over all processes.
    """
    rollout = config.rollout
    with contextlib.ExitStack() as stack:
        if rollout.addresses:
            addresses = tuple(rollout.addresses)[place[0] :: place[1]]
            token = read_token(rollout.token_file)
        else:
            if rollout.engine == "vllm":
                replica = vllm_child(config, directory / f"replica{place[0]}", reporter.line)
            else:
                engine = jax_engine(config, policy, tokenizer, device_lock)
                replica = EmbeddedReplica(
                    engine, in_flight=rollout.in_flight, stall_timeout_s=rollout.stall_timeout_s
                )
            stack.enter_context(replica)
            addresses, token = (replica.address,), replica.token
        client = stack.enter_context(
            RolloutClient(
                addresses,
                token,
                run_id=run_id,
                attempt_id=attempt_id,
                connect_timeout_s=rollout.connect_timeout_s,
                sync_timeout_s=rollout.call_timeout_s,
                generate_timeout_s=rollout.call_timeout_s,
                stall_timeout_s=rollout.stall_timeout_s,
                tls_ca=rollout.tls_ca_file,
                progress=reporter.line,
            )
        )
        descriptions = client.connect(
            model_hash=policy.config.hash,
            tokenizer_hash=data.tokenizer_hash(tokenizer),
            vocab_size=policy.config.vocab_size,
        )
        for description in descriptions:
            # It would refuse the weights, but only once a warm start has been made.
            if description.version and description.version.run_id != run_id:
                raise UserError(
                    f"replica {description.replica_id} belongs to run "
                    f"{description.version.run_id!r:.100}, and this one is {run_id!r}; "
                    "restart the replica to hand it over."
                )
            _check_limits(description, config, num_problems, place[1])
        yield client


def check_addresses(addresses: Sequence[str]) -> None:
    """Raises UserError where one is named twice: each process connects to its share alone."""
    twice = [address for address, n in collections.Counter(addresses).items() if n > 1]
    if twice:
        raise UserError(
            f"rollout.addresses names {twice[0]!r} more than once; name each replica once."
        )


def _check_limits(
    replica: ReplicaDescription,
    config: ml_collections.ConfigDict,
    num_problems: int = 0,
    num_owners: int = 1,
) -> None:
    """Raises UserError where a replica would refuse what the trainer is going to ask for.

    A call carries a process's share of a step, or of the problems of an evaluation.
    """
    groups, problems = (-(-n // num_owners) for n in (config.data.prompts_per_step, num_problems))
    num_prompts = max(groups * config.rollout.group_size, problems)
    fewer = "lower evaluation.num_problems, data.prompts_per_step or rollout.group_size"
    same = "start the replica with the trainer's config"
    for field, value, way_out in (
        ("max_prompts", num_prompts, fewer),
        ("max_prompt_tokens", config.rollout.max_prompt_tokens, same),
        ("max_response_tokens", config.rollout.max_response_tokens, same),
    ):
        limit = getattr(replica, field)
        if value > limit:
            raise UserError(
                f"replica {replica.replica_id} serves {field}={limit}, but the trainer asks for "
                f"{value}; {way_out}."
            )
    wanted = config.hidden_states.source == "rollout" or config.evaluation.metrics
    if wanted and -1 not in replica.layers:
        raise UserError(
            f"replica {replica.replica_id} sends no final hidden states; set "
            "hidden_states.source='policy' and evaluation.metrics=False."
        )
    for layer in config.metrics.layers if wanted else ():
        if layer not in replica.layers:
            reason = f" ({replica.layers_reason})" if replica.layers_reason else ""
            raise UserError(
                f"replica {replica.replica_id} sends hidden states of layers "
                f"{list(replica.layers)}{reason}, but metrics.layers has {layer}; leave it out."
            )
    if config.metrics.placement == "rollout":
        for name in config.metrics.names:
            if name not in replica.metric_kinds:
                raise UserError(
                    f"replica {replica.replica_id} measures {list(replica.metric_kinds)}, but "
                    f"metrics.names has {name!r}; start the replica from this release, or set "
                    "metrics.placement='trainer'."
                )


def check_fit(architecture: DecoderConfig, engine: Mesh, training: Mesh) -> None:
    """Refuses a model whose embedded replica does not fit beside the update's own arrays.

    Counted is what is certain, in float32: the replica's weights, and the first term of
    docs/memory.md. That both fit does not say that activations and cache do.

    Args:
      engine: the replica's mesh, see `configured_mesh`.
      training: the trainer's mesh.

    Raises:
      UserError: if these exceed what a device has, or the machine where devices are its cores.
    """
    num_parameters = sum(spec.num_bytes for spec in tensor_specs(architecture, "float32")) // 4
    shards = training.shape["fsdp"] * training.shape["tensor"]
    copy = 4 * num_parameters / engine.shape["tensor"]
    update = 20 * num_parameters / shards
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    where = "a device"
    if limit is None:
        copy, update = copy * engine.size, update * len(training.local_devices)
        limit, where = available_bytes(), "this process"
    if copy + update > limit:
        raise UserError(
            f"the model's {num_parameters:.3g} parameters take {copy / 2**30:.1f} GiB for the "
            f"embedded replica and {update / 2**30:.1f} GiB for the update, and {where} has "
            f"{limit / 2**30:.1f} GiB; name replicas by rollout.addresses, or raise "
            "rollout.jax_tensor_parallelism or mesh.fsdp."
        )
