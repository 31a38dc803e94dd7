"""The model that a config names: architecture, tokenizer, end tokens, parameters."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from semrl_jax import data, models
from semrl_jax.models import peft
from semrl_jax.models.directory import read_tensors
from semrl_jax.models.families import find_family
from semrl_jax.models.hf_weights import EMBEDDING, HEAD
from semrl_jax.settings.model import ReferenceModel, reference_models
from semrl_jax.support.errors import UserError, prefixed
from semrl_jax.support.safe_files import read_json_object

RANDOM_MODEL_FIELDS = (
    "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "tie_embeddings",
)  # fmt: skip


def build_policy(config: ml_collections.ConfigDict) -> tuple[models.Policy, Any]:
    """Architecture and tokenizer of `model.path`, or of a random model; or UserError."""
    if config.model.path:
        directory = models.find_directory(config.model.path)
        architecture = models.load_config(directory, config.model.family)
        tokenizer = data.load_tokenizer(directory)
        place = f"model.path={config.model.path}"
        data.check_vocabulary(tokenizer, architecture.vocab_size, place)
    else:
        tokenizer = data.character_tokenizer()
        model = config.model
        architecture = models.random_config(
            model.family or "qwen2",
            vocab_size=len(tokenizer),
            head_dim=model.hidden_size // model.num_heads,
            max_position_embeddings=2048,
            **{name: model[name] for name in RANDOM_MODEL_FIELDS},
        )
    model = config.model
    policy = models.Policy(
        architecture, model.compute_dtype, model.remat, attention=model.attention
    )
    return policy, tokenizer


def end_token_ids(config: ml_collections.ConfigDict, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's, and the ones that `model.path` names."""
    ids = {tokenizer.eos_token_id}
    if config.model.path:
        ids.update(models.eos_token_ids(models.find_directory(config.model.path)))
    return tuple(sorted(ids))


def starting_params(
    directory: pathlib.Path, policy: models.Policy, mesh: Mesh | None, dtype: str = "float32"
) -> models.Params:
    """The parameters of a model directory on the mesh, or in NumPy; UserError: they do not fit."""
    shardings = None if mesh is None else models.parameter_shardings(policy.shapes(), mesh)
    return models.load_params(directory, policy.config, shardings, dtype=dtype)


def lora_of(
    config: ml_collections.ConfigDict, architecture: models.DecoderConfig
) -> models.Lora | None:
    """What `config.lora` trains; None if it is off. UserError if it does not fit the model."""
    options = config.lora
    if not options.rank:
        return None
    modules = peft.find_modules(architecture, options.targets)
    lora = models.Lora(
        modules, options.rank, options.alpha, options.rank_stabilized, options.dropout
    )
    peft.check_rank(architecture, lora)
    return lora


def find_lora(
    config: ml_collections.ConfigDict, policy: models.Policy
) -> tuple[models.Lora, models.Params | None] | None:
    """What `config.lora` trains, and the adapter of `lora.path`; None: off. Or UserError."""
    options, architecture = config.lora, policy.config
    lora = lora_of(config, architecture)
    if lora is None:
        return None
    if not options.path:
        return lora, None
    with prefixed("lora.path"):
        files = peft.find_adapter(options.path)
        base = models.find_directory(config.model.path)
        adapter, own = peft.load_adapter(files, architecture, base, config.model.path)
    # Named as in the settings.
    wanted, has = ({**vars(each), "targets": each.modules} for each in (lora, own))
    for name in ("rank", "alpha", "rank_stabilized", "targets"):
        here, there = wanted[name], has[name]
        if here != there:
            if name == "targets":
                here, there = (peft.target_names(architecture, m) for m in (here, there))
            raise UserError(
                f"lora.{name}={here!r}, but the adapter in lora.path has {there!r}; set that."
            )
    return lora, adapter


class ReferenceFiles(NamedTuple):
    """A checked directory of a reference."""

    named: ReferenceModel
    model: models.Policy  # its architecture, on the mesh
    directory: pathlib.Path  # where its weights are


def find_references(
    config: ml_collections.ConfigDict, policy: models.Policy, tokenizer: Any, mesh: Mesh
) -> dict[str, ReferenceFiles]:
    """The references that are models of their own, as `reference_models`.

    UserError as `find_value_model`. A model on replicas need not fit the mesh.
    """
    found = {}
    for source, named in reference_models(config.model).items():
        place = None if named.addresses else mesh
        files = _beside(named.field, named.path, config, policy, tokenizer, place)
        model = dataclasses.replace(policy, config=files[1], mesh=place)
        found[source] = ReferenceFiles(named, model, files[0])
    return found


def output_matrix(files: ReferenceFiles) -> Float[np.ndarray, "V D"]:
    """The float32 matrix from which a model's final states get their logits."""
    config = files.model.config
    name = EMBEDDING if config.tie_embeddings else HEAD
    return read_tensors(files.directory, config, {}, [name])[name]


class ModelFiles(NamedTuple):
    """A checked directory of a critic or reward model."""

    model: models.ValueModel  # its architecture, on the mesh
    directory: pathlib.Path  # where its weights are
    has_head: bool  # whether it is a classifier


def find_value_model(
    field: str,
    path: str,
    config: ml_collections.ConfigDict,
    policy: models.Policy,
    tokenizer: Any | None,
    mesh: Mesh,
) -> ModelFiles:
    """The critic or reward model of a directory, checked without reading its weights.

    UserError if it is no language model or classifier with one label that this library supports,
    or does not fit the mesh; with the policy's `tokenizer`, also if it has another one or does not
    fit the lengths of the run.
    """
    if tokenizer is None:
        directory, architecture = _on_mesh(field, path, config, mesh)
    else:
        directory, architecture = _beside(field, path, config, policy, tokenizer, mesh)
    model = models.ValueModel.of(dataclasses.replace(policy, config=architecture, mesh=mesh))
    with prefixed(f"{field}={path!r}"):
        head = models.read_head(directory, model)
    return ModelFiles(model, directory, bool(head))


def _beside(
    field: str,
    path: str,
    config: ml_collections.ConfigDict,
    policy: models.Policy,
    tokenizer: Any,
    mesh: Mesh | None,
) -> tuple[pathlib.Path, models.DecoderConfig]:
    """The directory and architecture of another model that reads the policy's responses."""
    place = f"{field}={path!r}"
    directory, architecture = _on_mesh(field, path, config, mesh)
    data.check_same_tokens(field, directory, tokenizer)
    if architecture.vocab_size < policy.config.vocab_size:
        raise UserError(
            f"{place} has vocab_size={architecture.vocab_size}, but the policy may sample each of "
            f"{policy.config.vocab_size} tokens; name a model with at least as many."
        )
    length = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if length > architecture.max_position_embeddings:
        raise UserError(
            f"{place} has a context of {architecture.max_position_embeddings} tokens, less than "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {length}."
        )
    return directory, architecture


def _on_mesh(
    field: str, path: str, config: ml_collections.ConfigDict, mesh: Mesh | None
) -> tuple[pathlib.Path, models.DecoderConfig]:
    """The directory and architecture of a model whose parameters the mesh, if any, can hold.

    It may be of the policy's family, or of one of this package.
    """
    with prefixed(f"{field}={path!r}"):
        directory = models.find_directory(path)
        architecture = models.load_config(directory, _family_of(directory, config.model.family))
        if mesh is not None:
            models.check_mesh(architecture, mesh)
            models.Policy(architecture, attention=config.model.attention).check_attention(mesh)
    return directory, architecture


def _family_of(directory: pathlib.Path, family: str) -> str:
    """A given family if the model in the directory is of it, else ""."""
    try:
        model_type = read_json_object(directory / "config.json").get("model_type")
    except (FileNotFoundError, UserError):
        return ""  # `load_config` says what is wrong
    return family if family and model_type == find_family(family).model_type else ""


def value_params(
    directory: pathlib.Path, model: models.ValueModel, mesh: Mesh, dtype: str = "float32"
) -> models.Params:
    """The parameters of a critic or reward model on the mesh; raises as `starting_params`."""
    shardings = models.parameter_shardings(model.shapes(), mesh)
    params = models.load_value_params(directory, model, shardings)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
