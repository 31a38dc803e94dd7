"""Sharded NNX policies: architecture, forward pass, log-probabilities, weight conversion."""

from semrl_jax.models.config import DecoderConfig, config_from_hf, config_to_hf
from semrl_jax.models.decoder import Decoder, KVCache
from semrl_jax.models.directory import load_config, load_params, save_directory
from semrl_jax.models.policy import DTYPES, REMAT_POLICIES, Params, Policy
from semrl_jax.models.sharding import (
    AXES,
    DATA_AXES,
    batch_sharding,
    make_mesh,
    parameter_shardings,
    replicated,
)
from semrl_jax.models.weights import iterate_hf_tensors, params_from_hf, tensor_specs

__all__ = [
    "AXES",
    "DATA_AXES",
    "DTYPES",
    "REMAT_POLICIES",
    "Decoder",
    "DecoderConfig",
    "KVCache",
    "Params",
    "Policy",
    "batch_sharding",
    "config_from_hf",
    "config_to_hf",
    "iterate_hf_tensors",
    "load_config",
    "load_params",
    "make_mesh",
    "parameter_shardings",
    "params_from_hf",
    "replicated",
    "save_directory",
    "tensor_specs",
]
