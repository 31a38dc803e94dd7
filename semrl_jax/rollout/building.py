"""Makes the replicas and engines that a config describes."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections
from jax.sharding import Mesh

import configs
from semrl_jax import data
from semrl_jax.models import (
    DecoderConfig,
    Policy,
    check_mesh,
    config_to_hf,
    layer_kernels,
    make_mesh,
    tensor_specs,
)
from semrl_jax.rollout.client.child import ChildReplica
from semrl_jax.rollout.engines.base import Engine
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.rollout.wire.auth import TOKEN_VARIABLE, check_token, read_file
from semrl_jax.settings.rollout import longest_prompt
from semrl_jax.support.cores import cores_of_child
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import jsonable, write_json


def jax_engine(
    config: ml_collections.ConfigDict,
    policy: Policy,
    tokenizer: Any,
    device_lock: threading.Lock | None = None,
) -> JaxEngine:
    """The JAX engine of a config, with the trainer's lock if embedded; raises as `engine_mesh`."""
    rollout = config.rollout
    return JaxEngine(
        policy,
        mesh=configured_mesh(config, policy.config),
        tokenizer_hash=data.tokenizer_hash(tokenizer),
        tokens=_tokens(tokenizer),
        max_batch=rollout.jax_max_batch,
        chunk=rollout.jax_chunk_tokens,
        max_prompt_tokens=longest_prompt(config),
        max_response_tokens=rollout.max_response_tokens,
        device_lock=device_lock,
    )


def vllm_python(config: ml_collections.ConfigDict) -> str:
    """The Python of vLLM's environment; UserError if it is missing."""
    python = config.rollout.vllm_python
    if not pathlib.Path(python).exists():
        raise UserError(
            f"rollout.vllm_python={python} does not exist; make the environment with "
            "third_party/vllm_patch/make_env.sh, or name the python of another one with vLLM."
        )
    return os.path.abspath(python)


def vllm_child(
    config: ml_collections.ConfigDict,
    directory: pathlib.Path,
    progress: Callable[[str], None],
    token: str | None = None,
) -> ChildReplica:
    """Starts a vLLM replica in the environment of `rollout.vllm_python`."""
    command = [vllm_python(config), "-m", "launch.rollout", "--engine=vllm"]
    return _child(command, config, directory, progress, token)


def jax_children(
    config: ml_collections.ConfigDict,
    directory: pathlib.Path,
    progress: Callable[[str], None],
    token: str,
) -> list[ChildReplica]:
    """Starts `rollout.jax_processes` JAX replicas, in directories `<directory>_0` and so on."""
    count, per_child = config.rollout.jax_processes, config.rollout.jax_process_cores

    def start(number: int) -> ChildReplica:
        command = [sys.executable, "-m", "launch.rollout", "--engine=jax"]
        command += [f"--cores={core}" for core in cores_of_child(number, per_child)]
        own = directory.with_name(f"{directory.name}_{number}")
        return _child(command, config, own, progress, token, awaited=False)

    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(start(number)) for number in range(count)]
        for child in children:  # they start side by side
            child.await_listening()
        stack.pop_all()
    return children


def _child(
    command: Sequence[str],
    config: ml_collections.ConfigDict,
    directory: pathlib.Path,
    progress: Callable[[str], None],
    token: str | None,
    awaited: bool = True,
) -> ChildReplica:
    """A replica with the settings of this run. Makes `directory` for its settings and its log."""
    directory.mkdir(exist_ok=True)
    settings = directory / "config.json"
    record = jsonable(config.to_dict())
    # The child runs in another directory, and gets its token from this process.
    if config.model.path and os.path.isdir(config.model.path):
        record["model"]["path"] = os.path.abspath(config.model.path)
    record["rollout"]["token_file"] = ""
    write_json(settings, {"config": record})
    root = pathlib.Path(configs.__file__).parents[1]
    return ChildReplica(
        [*command, f"--config={root / 'configs' / 'recorded.py'}:{settings}"],
        token=token,
        directory=root,
        log=directory / "log.txt",
        start_timeout_s=config.rollout.connect_timeout_s,
        progress=progress,
        awaited=awaited,
    )


def vllm_engine(
    config: ml_collections.ConfigDict, policy: Policy, tokenizer: Any, directory: pathlib.Path
) -> Engine:
    """The vLLM engine of a config; raises as `VllmEngine`. Writes config.json into `directory`."""
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
            tokens=_tokens(tokenizer),
            adapter_modules=tuple(kernel.name for kernel in layer_kernels(architecture).values()),
        ),
        VllmSettings(
            dtype=dtype,
            max_num_seqs=rollout.vllm_max_num_seqs,
            max_num_batched_tokens=rollout.vllm_max_num_batched_tokens,
            tensor_parallel_size=rollout.vllm_tensor_parallelism,
            gpu_memory_utilization=rollout.vllm_gpu_memory_utilization,
            kv_cache_gib=rollout.vllm_kv_cache_gib,
            enforce_eager=rollout.vllm_enforce_eager,
            quantization=rollout.vllm_quantization,
            inner_states=rollout.vllm_inner_states,
            sleeps=rollout.in_turns,
            max_tokens=rollout.max_prompt_tokens + rollout.max_response_tokens,
            max_adapter_rank=_adapter_rank(config, architecture),
        ),
        max_prompt_tokens=longest_prompt(config),
        max_response_tokens=rollout.max_response_tokens,
    )


def _adapter_rank(config: ml_collections.ConfigDict, architecture: DecoderConfig) -> int:
    """The rank of adapters that vLLM applies unmerged; 0: none, or it cannot.

    With adapters, vLLM 0.32 on a CPU has no kernel for experts. 8-bit weights were not tried.
    """
    from semrl_jax.rollout.engines.vllm import ADAPTER_RANKS

    rank, merges = config.lora.rank, architecture.experts or config.rollout.vllm_quantization
    return rank if rank <= ADAPTER_RANKS[-1] and not merges else 0


def _tokens(tokenizer: Any) -> data.TokenBytes | None:
    """None for a tokenizer with which an engine cannot find stop strings."""
    try:
        return data.TokenBytes(tokenizer)
    except UserError:
        return None


def configured_mesh(
    config: ml_collections.ConfigDict,
    architecture: DecoderConfig,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """The JAX engine's devices; raises as `engine_mesh`."""
    tensor, data = config.rollout.jax_tensor_parallelism, config.rollout.jax_data_parallelism
    return engine_mesh(architecture, tensor=tensor, data=data, devices=devices)


def engine_mesh(
    architecture: DecoderConfig,
    *,
    tensor: int,
    data: int,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """The first `tensor * data` devices of a process; by default of this one.

    One of `tensor` and `data` may be -1, which takes the remaining devices. Raises UserError if
    there are too few devices, if `tensor` does not divide the architecture, or if `data` is no
    power of two.
    """
    devices = jax.local_devices() if devices is None else devices
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


def read_token(token_file: str) -> str:
    """The replicas' token from a file or $SEMRL_ROLLOUT_TOKEN; never from a command line."""
    if token_file:
        token = read_file("rollout.token_file", token_file).decode("ascii", "replace").strip()
    else:
        token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise UserError(
            "the replicas' token is empty: name a file by rollout.token_file or set "
            f"${TOKEN_VARIABLE}."
        )
    return check_token(token)
