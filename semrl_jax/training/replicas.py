"""The replicas a run samples from: given addresses, one embedded here, or a child process."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import ml_collections
from jax.sharding import Mesh

import configs
from semrl_jax import data
from semrl_jax.errors import UserError
from semrl_jax.files import write_json
from semrl_jax.models import DecoderConfig, Policy, check_mesh, make_mesh, tensor_specs
from semrl_jax.models.config import config_to_hf
from semrl_jax.rollout.auth import TOKEN_VARIABLE
from semrl_jax.rollout.child import ChildReplica
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.embedded import EmbeddedReplica
from semrl_jax.rollout.engines.base import Engine
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.rollout.memory import available_bytes
from semrl_jax.training.console import Reporter
from semrl_jax.training.workdir import Workdir, jsonable
from semrl_jax.types import ReplicaDescription


@contextlib.contextmanager
def open_client(
    config: ml_collections.ConfigDict,
    policy: Policy,
    tokenizer: Any,
    workdir: Workdir,
    device_lock: threading.Lock,
    reporter: Reporter,
    place: tuple[int, int] = (0, 1),
    num_problems: int = 0,
) -> Iterator[RolloutClient]:
    """A connected client of `rollout.addresses`, or of a replica of its own: `rollout.engine`.

    With several processes that sample, `place` (which of how many) takes every so many-th address.
    `num_problems` is how many an evaluation samples, in all processes.
    """
    rollout = config.rollout
    with contextlib.ExitStack() as stack:
        if rollout.addresses:
            addresses = tuple(rollout.addresses)[place[0] :: place[1]]
            token = read_token(rollout.token_file)
        else:
            if rollout.engine == "vllm":
                replica = vllm_child(config, workdir.path / f"replica{place[0]}", reporter.line)
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
                run_id=workdir.run_id,
                attempt_id=workdir.attempt_id,
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
            if description.version and description.version.run_id != workdir.run_id:
                raise UserError(
                    f"replica {description.replica_id} belongs to run "
                    f"{description.version.run_id!r:.100}, and this one is {workdir.run_id!r}; "
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


def jax_engine(
    config: ml_collections.ConfigDict,
    policy: Policy,
    tokenizer: Any,
    device_lock: threading.Lock | None = None,
) -> JaxEngine:
    """The JAX engine as the config wants it, embedded (with the trainer's lock) or on its own.

    Raises:
      UserError: if it cannot be split over this process's devices as the config wants it.
    """
    rollout = config.rollout
    return JaxEngine(
        policy,
        mesh=configured_mesh(config, policy.config),
        tokenizer_hash=data.tokenizer_hash(tokenizer),
        max_batch=rollout.jax_max_batch,
        chunk=rollout.jax_chunk_tokens,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_response_tokens=rollout.max_response_tokens,
        device_lock=device_lock,
    )


def vllm_child(
    config: ml_collections.ConfigDict, directory: pathlib.Path, progress: Callable[[str], None]
) -> ChildReplica:
    """A vLLM replica in the environment of `rollout.vllm_python`, with the settings of this run.

    Args:
      directory: for its settings and what it prints; made.
      progress: takes one line about a wait.
    """
    python = config.rollout.vllm_python
    if not pathlib.Path(python).exists():
        raise UserError(
            f"rollout.vllm_python={python} does not exist; make the environment with "
            "third_party/vllm_patch/make_env.sh, or name the python of another one with vLLM."
        )
    directory.mkdir(exist_ok=True)
    settings = directory / "config.json"
    record = jsonable(config.to_dict())
    # The child runs in another directory, and has the token of this process.
    if config.model.path and os.path.isdir(config.model.path):
        record["model"]["path"] = os.path.abspath(config.model.path)
    record["rollout"]["token_file"] = ""
    write_json(settings, {"config": record})
    root = pathlib.Path(configs.__file__).parents[1]
    return ChildReplica(
        [
            os.path.abspath(python), "-m", "launch.rollout", "--engine=vllm",
            f"--config={root / 'configs' / 'recorded.py'}:{settings}",
        ],
        directory=root,
        log=directory / "log.txt",
        start_timeout_s=config.rollout.connect_timeout_s,
        progress=progress,
    )  # fmt: skip


def vllm_engine(
    config: ml_collections.ConfigDict, policy: Policy, tokenizer: Any, directory: pathlib.Path
) -> Engine:
    """The vLLM engine as the config wants it, in the environment that has vLLM.

    Args:
      directory: an empty one, where vLLM finds the architecture; the weights come from a trainer.

    Raises:
      UserError: if vLLM or its plugin is missing or does not fit, or memory does not suffice.
    """
    from semrl_jax.rollout.engines.vllm import VllmEngine, VllmModel, VllmSettings

    rollout, architecture = config.rollout, policy.config
    dtype = rollout.weight_dtype or policy.compute_dtype
    hf = config_to_hf(architecture, dtype=dtype)
    (directory / "config.json").write_text(json.dumps(hf))
    return VllmEngine(
        VllmModel(
            directory=str(directory),
            specs=tuple(tensor_specs(architecture, dtype)),
            model_hash=architecture.hash,
            tokenizer_hash=data.tokenizer_hash(tokenizer),
            vocab_size=architecture.vocab_size,
            hidden_size=architecture.hidden_size,
            num_layers=architecture.num_layers,
        ),
        VllmSettings(
            dtype=dtype,
            max_num_seqs=rollout.vllm_max_num_seqs,
            max_num_batched_tokens=rollout.vllm_max_num_batched_tokens,
            tensor_parallel_size=rollout.vllm_tensor_parallelism,
            gpu_memory_utilization=rollout.vllm_gpu_memory_utilization,
            kv_cache_gib=rollout.vllm_kv_cache_gib,
            enforce_eager=rollout.vllm_enforce_eager,
            in_flight=rollout.in_flight,
        ),
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_response_tokens=rollout.max_response_tokens,
    )


def configured_mesh(config: ml_collections.ConfigDict, architecture: DecoderConfig) -> Mesh:
    """The JAX engine's devices; raises as `engine_mesh`."""
    rollout = config.rollout
    return engine_mesh(
        architecture, tensor=rollout.jax_tensor_parallelism, data=rollout.jax_data_parallelism
    )


def engine_mesh(architecture: DecoderConfig, *, tensor: int, data: int) -> Mesh:
    """The first `tensor * data` devices of this process, of which other processes have no part.

    Args:
      architecture: what is to be split.
      tensor: rollout.jax_tensor_parallelism; -1 takes the devices left over.
      data: rollout.jax_data_parallelism; likewise, but not both.

    Raises:
      UserError: if there are too few devices, if `tensor` does not divide the architecture, or if
        `data` is no power of two.
    """
    devices = jax.local_devices()
    fields = f"rollout.jax_tensor_parallelism={tensor}, rollout.jax_data_parallelism={data}"
    if tensor == -1:
        tensor = len(devices) // data
    if data == -1:
        data = len(devices) // tensor
    if not 0 < tensor * data <= len(devices):
        raise UserError(
            f"{fields}: their product must be at most the {len(devices)} devices of this process; "
            "lower one of them."
        )
    if data & (data - 1):
        raise UserError(
            f"{fields}: the engine's batch is a power of two, which {data} copies of the weights "
            "do not divide; set rollout.jax_data_parallelism to a power of two."
        )
    shape = {"replica": data, "fsdp": 1, "sequence": 1, "tensor": tensor}
    mesh = make_mesh(shape, devices[: tensor * data])
    try:
        check_mesh(architecture, mesh)
    except UserError as error:
        raise UserError(f"{fields}: on the engine's own mesh, {error}") from None
    return mesh


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


def read_token(token_file: str) -> str:
    """The replicas' token from a file or $SEMRL_ROLLOUT_TOKEN; never from a command line."""
    if token_file:
        try:
            token = pathlib.Path(token_file).read_text().strip()
        except OSError as error:
            raise UserError(
                f"rollout.token_file={token_file} cannot be read: {error.strerror}."
            ) from None
    else:
        token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise UserError(
            "the replicas' token is empty: name a file by rollout.token_file or set "
            f"${TOKEN_VARIABLE}."
        )
    return token
