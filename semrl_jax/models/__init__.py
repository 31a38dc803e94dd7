"""Sharded NNX policies: architecture, forward pass, log-probabilities, weight conversion."""

from semrl_jax.models import peft
from semrl_jax.models.checksums import array_sums
from semrl_jax.models.decoder import KVCache
from semrl_jax.models.decoder_config import DecoderConfig, Experts, RopeScaling, random_config
from semrl_jax.models.directory import (
    check_params,
    eos_token_ids,
    find_directory,
    load_config,
    load_params,
    save_directory,
    weights_hash,
    weights_sample,
)
from semrl_jax.models.families import Family
from semrl_jax.models.hf_config import config_from_hf, config_to_hf
from semrl_jax.models.hf_weights import (
    Piece,
    UnstackedParams,
    adapter_of,
    adapter_tensors,
    hf_tensors,
    iterate_adapter_tensors,
    iterate_base_tensors,
    iterate_engine_tensors,
    iterate_hf_tensors,
    layer_kernels,
    num_parameters,
    params_from_hf,
    tensor_specs,
)
from semrl_jax.models.hosts import from_host, to_host
from semrl_jax.models.lora import VALUE_HEAD, Base, Lora, adapted
from semrl_jax.models.policy import Params, Policy, unstacked
from semrl_jax.models.sharding import (
    AXES,
    DATA_AXES,
    check_mesh,
    make_mesh,
    parameter_shardings,
    replicated,
)
from semrl_jax.models.value_model import ValueModel, load_value_params, read_head, with_head
from semrl_jax.support.choices import REMAT_POLICIES

__all__ = [
    "adapted", "adapter_of", "adapter_tensors", "array_sums", "AXES", "Base", "check_mesh",
    "check_params", "config_from_hf", "config_to_hf", "DATA_AXES", "DecoderConfig", "eos_token_ids",
    "Experts", "Family", "find_directory", "from_host", "hf_tensors", "iterate_adapter_tensors",
    "iterate_base_tensors", "iterate_engine_tensors", "iterate_hf_tensors", "layer_kernels",
    "KVCache", "load_config", "load_params", "load_value_params", "Lora", "make_mesh",
    "num_parameters", "parameter_shardings", "Params", "params_from_hf", "peft", "Piece", "Policy",
    "random_config", "read_head", "REMAT_POLICIES", "replicated", "RopeScaling", "save_directory",
    "tensor_specs", "to_host", "unstacked", "UnstackedParams", "VALUE_HEAD", "ValueModel",
    "weights_hash", "weights_sample", "with_head",
]  # fmt: skip
