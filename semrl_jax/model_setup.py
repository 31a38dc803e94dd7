"""The model that a config names: architecture, tokenizer, end tokens, parameters."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import ml_collections
from jax.sharding import Mesh

from semrl_jax import data, models
from semrl_jax.errors import UserError

RANDOM_MODEL_FIELDS = (
    "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "tie_embeddings",
)  # fmt: skip


def build_policy(config: ml_collections.ConfigDict) -> tuple[models.Policy, Any]:
    """Architecture and transformers tokenizer of `model.path`, or of a random model.

    Raises:
      UserError: if the directory is missing, unsupported or has no fitting tokenizer.
    """
    if config.model.path:
        directory = models.find_directory(config.model.path)
        architecture = models.load_config(directory, config.model.family)
        tokenizer = data.load_tokenizer(directory)
        if len(tokenizer) > architecture.vocab_size:
            raise UserError(
                f"model.path={config.model.path}: the tokenizer has {len(tokenizer)} tokens, the "
                f"model vocab_size={architecture.vocab_size}; they do not belong together."
            )
    else:
        tokenizer = data.character_tokenizer()
        model, family = config.model, config.model.family or "qwen2"
        architecture = models.DecoderConfig(
            model_type=models.find_family(family).model_type,
            family=family if "." in family else "",
            vocab_size=len(tokenizer),
            head_dim=model.hidden_size // model.num_heads,
            max_position_embeddings=2048,
            **{name: model[name] for name in RANDOM_MODEL_FIELDS},
        )
    return models.Policy(architecture, config.model.compute_dtype, config.model.remat), tokenizer


def end_token_ids(config: ml_collections.ConfigDict, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a response: that of the tokenizer, and those named in `model.path`."""
    ids = {tokenizer.eos_token_id}
    if config.model.path:
        ids.update(models.eos_token_ids(models.find_directory(config.model.path)))
    return tuple(sorted(ids))


def starting_params(
    directory: pathlib.Path, policy: models.Policy, mesh: Mesh, dtype: str = "float32"
) -> models.Params:
    """The parameters of a model directory on the mesh.

    Raises:
      UserError: if the weights are missing or do not fit the architecture or the mesh.
    """
    shardings = models.parameter_shardings(policy.shapes(), mesh)
    params = models.load_params(directory, policy.config, shardings)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def value_params(
    directory: pathlib.Path, model: models.ValueModel, mesh: Mesh, dtype: str = "float32"
) -> models.Params:
    """The parameters of a critic or reward model on the mesh; raises as `starting_params`."""
    shardings = models.parameter_shardings(model.shapes(), mesh)
    params = models.load_value_params(directory, model, shardings)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
