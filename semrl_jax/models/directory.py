"""Hugging Face model directories: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from semrl_jax.errors import UserError
from semrl_jax.models.config import DecoderConfig, config_from_hf, config_to_hf
from semrl_jax.models.policy import Params
from semrl_jax.models.weights import iterate_hf_tensors, params_from_hf, tensor_specs

WEIGHTS_FILE = "model.safetensors"


def load_config(path: str | pathlib.Path) -> DecoderConfig:
    """Reads `config.json`; UserError if the directory or a field is missing."""
    return config_from_hf(_read_json(pathlib.Path(path) / "config.json"))


def load_params(path: str | pathlib.Path, config: DecoderConfig) -> Params:
    """Reads `model.safetensors` as float32 host parameters.

    Raises:
      UserError: naming the file and each missing, extra or misshapen tensor.
    """
    file = pathlib.Path(path) / WEIGHTS_FILE
    if not file.is_file():
        raise UserError(f"model.path={path}: {WEIGHTS_FILE} is missing.")
    expected = {spec.name: spec.shape for spec in tensor_specs(config, "float32")}
    try:
        with safe_open(str(file), framework="numpy") as weights:
            found = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
            # transformers may write a tied output matrix next to the embedding it equals.
            if config.tie_embeddings:
                found.pop("lm_head.weight", None)
            problems = [
                *(f"{name} is missing" for name in expected.keys() - found.keys()),
                *(f"{name} is not part of the model" for name in found.keys() - expected.keys()),
                *(
                    f"{name} has shape {found[name]}, not {shape}"
                    for name, shape in expected.items()
                    if name in found and found[name] != shape
                ),
            ]
            if problems:
                raise UserError(f"{file}: {'; '.join(sorted(problems)[:5])}.")
            return params_from_hf({name: weights.get_tensor(name) for name in expected}, config)
    except SafetensorError as error:
        raise UserError(f"{file} cannot be read: {error}.") from None


def save_directory(
    path: str | pathlib.Path, params: Params, config: DecoderConfig, tokenizer
) -> None:
    """Writes a directory that transformers, vLLM and `load_params` read, whole or not at all.

    Args:
      path: replaced if it exists.
      params: parameters as `Policy.init` gives them.
      config: their architecture.
      tokenizer: a transformers tokenizer with `eos_token_id` and `pad_token_id`.
    """
    path = pathlib.Path(path)
    staging = path.with_name(path.name + ".writing")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    tensors: dict[str, np.ndarray] = {
        spec.name: array for spec, array in iterate_hf_tensors(params, config, "float32")
    }
    save_file(tensors, staging / WEIGHTS_FILE, metadata={"format": "pt"})
    hf = config_to_hf(
        config, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    (staging / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (staging / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.save_pretrained(staging)
    shutil.rmtree(path, ignore_errors=True)
    staging.rename(path)


def _read_json(file: pathlib.Path) -> dict:
    if not file.is_file():
        raise UserError(f"{file} is missing: model.path must be a Hugging Face model directory.")
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}.") from None
