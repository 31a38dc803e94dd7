"""Sharded NNX policies: architecture, forward pass, log-probabilities, weight conversion."""

from semrl_jax.models import peft
from semrl_jax.models.config import DecoderConfig, Experts, RopeScaling, random_config
from semrl_jax.models.decoder import KVCache
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
from semrl_jax.models.families import Family, find_family
from semrl_jax.models.hf_config import config_from_hf, config_to_hf
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
from semrl_jax.models.weights import (
    Piece,
    UnstackedParams,
    iterate_hf_tensors,
    num_parameters,
    params_from_hf,
    tensor_specs,
)
from semrl_jax.support.choices import REMAT_POLICIES

__all__ = [
    "AXES",
    "Base",
    "DATA_AXES",
    "REMAT_POLICIES",
    "DecoderConfig",
    "Experts",
    "Family",
    "KVCache",
    "Lora",
    "Params",
    "Piece",
    "Policy",
    "RopeScaling",
    "UnstackedParams",
    "VALUE_HEAD",
    "ValueModel",
    "adapted",
    "check_mesh",
    "check_params",
    "config_from_hf",
    "config_to_hf",
    "eos_token_ids",
    "find_directory",
    "find_family",
    "from_host",
    "iterate_hf_tensors",
    "load_config",
    "load_params",
    "load_value_params",
    "make_mesh",
    "num_parameters",
    "parameter_shardings",
    "params_from_hf",
    "peft",
    "read_head",
    "random_config",
    "replicated",
    "save_directory",
    "tensor_specs",
    "unstacked",
    "to_host",
    "weights_hash",
    "weights_sample",
    "with_head",
]
