"""Adapters by their Hugging Face names, and directories in PEFT's format."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from semrl_jax.models.decoder_config import MAX_SIZE, DecoderConfig
from semrl_jax.models.directory import FILE_DTYPES, find_directory, weights_sample
from semrl_jax.models.hf_weights import layer_kernels
from semrl_jax.models.lora import MAX_ALPHA, A, B, Lora
from semrl_jax.models.policy import Params
from semrl_jax.support.errors import UserError, prefixed
from semrl_jax.support.safe_files import read_json_object, replacing_directory
from semrl_jax.support.tensor_files import write_tensors

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEAR = "all-linear"  # as in PEFT: all linear modules but the output matrix
BASE_SAMPLE = "base_weights_sample"  # in the metadata of our files
base_sample = weights_sample  # what identifies the weights of a base
# Fields of PEFT's LoraConfig that are in none of the next three tables must be absent, null, false
# or empty. A field of a later version of PEFT is therefore refused by name when it is used.
READ = ("peft_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora")
# The tensors of a trained adapter give the same logits with every value. Dropout exists only in
# training, where `lora.dropout` says what it is.
WITHOUT_EFFECT = (
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "target_modules",
    "exclude_modules", "lora_dropout", "layers_pattern", "megatron_core", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config",
    "ensure_weight_tying",
)  # fmt: skip
# Supported values besides null, and what to do with another one.
SUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "bias": (("none",), "train an adapter without biases"),
    "init_lora_weights": (
        (True, False, "gaussian", "eva", "orthogonal", "mica"),
        "the other ones change the weights of the base; save the adapter by PEFT's "
        "save_pretrained(..., path_initial_model_for_weight_conversion=...), which makes it an "
        "adapter of the unchanged base",
    ),
}
LEAVES = {A: "lora_A.weight", B: "lora_B.weight"}
# The module that a tensor of an adapter belongs to, below its layer if it is in one.
_ADAPTED = re.compile(r"base_model\.model\.(?:model\.layers\.\d+\.)?(.+?)\.(?:lora_|base_layer)")


def find_modules(config: DecoderConfig, targets: Sequence[str]) -> tuple[str, ...]:
    """The modules of a layer that `lora.targets` names; UserError for one that matches none."""
    if fused := config.declared.fused:
        raise UserError(
            f"lora.rank: model_type={config.model_type!r} has fused kernels in its files "
            f"({', '.join(fused)}), and peft cannot read adapters of their parts; set lora.rank=0."
        )
    names = {module: kernel.name for module, kernel in layer_kernels(config).items()}
    found = set()
    for target in targets:
        matching = {
            module
            for module, name in names.items()
            if target == ALL_LINEAR
            or fnmatch.fnmatchcase(name, target)
            or fnmatch.fnmatchcase(name.rpartition(".")[2], target)
        }
        if not matching:
            choices = ", ".join(name.rpartition(".")[2] for name in names.values())
            raise UserError(
                f"lora.targets has {target!r}, which matches no linear module of a layer; choose "
                f"from {choices}, patterns of them, and {ALL_LINEAR!r}."
            )
        found |= matching
    return tuple(module for module in names if module in found)


def target_names(config: DecoderConfig, modules: Sequence[str]) -> tuple[str, ...]:
    """Modules of a decoder's layer by the names that `lora.targets` has."""
    kernels = layer_kernels(config)
    return tuple(kernels[module].name.rpartition(".")[2] for module in modules)


def check_rank(config: DecoderConfig, lora: Lora) -> None:
    """Raises UserError if the rank is larger than a dimension of a module."""
    for module, kernel in layer_kernels(config).items():
        if module in lora.modules and lora.rank > min(kernel.shape):
            raise UserError(
                f"lora.rank={lora.rank} must be at most {min(kernel.shape)} for {kernel.name}."
            )


def save_adapter(
    path: str | os.PathLike[str],
    adapter: Params,
    lora: Lora,
    config: DecoderConfig,
    base: pathlib.Path,
    base_name: str,
) -> None:
    """Writes a directory for `peft.PeftModel.from_pretrained` and `load_adapter`, or nothing.

    `base_name` is the hub id or the directory, for `base_model_name_or_path`.
    """
    kernels = layer_kernels(config)
    tensors = {
        _tensor(layer, kernels[module].name, leaf): np.ascontiguousarray(matrix.T)
        for module in lora.modules
        for leaf in LEAVES
        for layer, matrix in enumerate(np.asarray(adapter["layers"][module][leaf], np.float32))
    }
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rank_stabilized,
        "target_modules": [*target_names(config, lora.modules)],
        "bias": "none",
        "inference_mode": True,
    }
    with replacing_directory(pathlib.Path(path)) as staging:
        with open(staging / WEIGHTS_FILE, "xb") as out:
            write_tensors(out, tensors, {"format": "pt", BASE_SAMPLE: base_sample(base)})
        (staging / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")


def adapter_hash(adapter: Params) -> str:
    """Hex SHA-256 of the values of an adapter in NumPy."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(adapter):
        digest.update(jax.tree_util.keystr(path).encode() + leaf.tobytes())
    return digest.hexdigest()


def num_parameters(config: DecoderConfig, lora: Lora) -> int:
    kernels = layer_kernels(config)
    return lora.rank * config.num_layers * sum(sum(kernels[m].shape) for m in lora.modules)


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a directory in PEFT's format."""
    return bool(path) and (pathlib.Path(path) / CONFIG_FILE).is_file()


class AdapterFiles(NamedTuple):
    """A directory in PEFT's format whose settings are supported; the last three as in `Lora`."""

    path: pathlib.Path
    base_name: str  # its `base_model_name_or_path`; "" if it has none
    rank: int
    alpha: float
    rank_stabilized: bool

    def base(self) -> pathlib.Path:
        """The directory of the base that it names; raises UserError if there is none."""
        field = f"{self.path / CONFIG_FILE}: base_model_name_or_path"
        if not self.base_name:
            raise UserError(f"{field} is missing or empty; set it to the base of the adapter.")
        with prefixed(field):
            return find_directory(self.base_name)


def find_adapter(path: str | os.PathLike[str]) -> AdapterFiles:
    """Reads `adapter_config.json`; UserError if it asks for what is not supported."""
    file = pathlib.Path(path) / CONFIG_FILE
    try:
        content = read_json_object(file)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{str(path)!r} is no adapter: {CONFIG_FILE} is missing; name a directory of PEFT."
        ) from None
    if content.get("peft_type") != "LORA":
        raise UserError(f"{file}: peft_type={content.get('peft_type')!r:.100} must be 'LORA'.")
    for name, value in content.items():
        if name in SUPPORTED:
            values, way_out = SUPPORTED[name]
            if value is not None and value not in values:
                raise UserError(
                    f"{file}: {name}={value!r:.100} is not supported, only {values!r}; {way_out}."
                )
        # layers_to_transform=0 names the first layer
        elif name not in (*READ, *WITHOUT_EFFECT) and (value or type(value) in (int, float)):
            raise UserError(
                f"{file}: {name}={value!r:.100} is not supported; train an adapter without it."
            )
    rank, alpha = content.get("r"), content.get("lora_alpha")
    is_number = type(alpha) in (int, float) and 0 < alpha < MAX_ALPHA
    if type(rank) is not int or not 0 < rank <= MAX_SIZE or not is_number:
        raise UserError(
            f"{file}: r={rank!r:.50} must be a whole number above 0, and at most {MAX_SIZE}, and "
            f"lora_alpha={alpha!r:.50} a number above 0, and below {MAX_ALPHA:g}."
        )
    stabilized = content.get("use_rslora")
    if not isinstance(stabilized, bool | None):
        raise UserError(f"{file}: use_rslora={stabilized!r:.100} must be true or false.")
    name = content.get("base_model_name_or_path")
    name = name if isinstance(name, str) else ""
    return AdapterFiles(file.parent, name, rank, float(alpha), bool(stabilized))


def load_adapter(
    files: AdapterFiles, config: DecoderConfig, base: pathlib.Path, base_name: str
) -> tuple[Params, Lora]:
    """The adapter of a directory, float32 in NumPy, and what it is; UserError if it is wrong."""
    file = files.path / WEIGHTS_FILE
    if not file.is_file():
        raise UserError(f"{file} is missing.")
    try:
        with safe_open(str(file), framework="numpy") as weights:
            _check_base(files, weights.metadata() or {}, base, base_name)
            tensors = {}
            for name in weights.keys():  # noqa: SIM118
                if (dtype := weights.get_slice(name).get_dtype()) not in FILE_DTYPES:
                    raise UserError(
                        f"{file}: {name:.100} is of dtype {dtype}, not of {tuple(FILE_DTYPES)}."
                    )
                tensors[name] = weights.get_tensor(name).astype(np.float32)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read: {error}.") from None
    kernels = layer_kernels(config)
    modules = tuple(
        module
        for module, kernel in kernels.items()
        if any(_tensor(layer, kernel.name, A) in tensors for layer in range(config.num_layers))
    )
    lora = Lora(modules, files.rank, files.alpha, files.rank_stabilized)
    layers: dict[str, dict[str, np.ndarray]] = {module: {} for module in modules}
    for module in modules:
        num_out, num_in = kernels[module].shape
        for leaf, shape in {A: (lora.rank, num_in), B: (num_out, lora.rank)}.items():
            found = []
            for layer in range(config.num_layers):
                name = _tensor(layer, kernels[module].name, leaf)
                tensor = tensors.pop(name, None)
                if tensor is None or tensor.shape != shape:
                    there = "is missing" if tensor is None else f"has shape {tensor.shape}"
                    raise UserError(
                        f"{file}: {name} {there}; rank {lora.rank} of {base_name} needs {shape}."
                    )
                if not np.isfinite(tensor).all():
                    raise UserError(
                        f"{file}: {name} has a value that is not finite; take an earlier adapter."
                    )
                found.append(tensor.T)
            layers[module][leaf] = np.stack(found)
    if tensors or not modules:
        name = min(tensors, default="no tensor")
        adapted = _ADAPTED.match(name)
        names = [kernel.name for kernel in kernels.values()]
        if adapted and adapted[1] not in names:
            raise UserError(
                f"{file}: {name:.150} adapts {adapted[1]:.100}, but only the linear modules of a "
                f"layer can have an adapter ({', '.join(names)}); train one without it."
            )
        raise UserError(
            f"{file}: {name:.150} adapts no linear module of {base_name}; name its own base."
        )
    return {"layers": layers}, lora


def _check_base(
    files: AdapterFiles, metadata: Mapping[str, Any], base: pathlib.Path, base_name: str
) -> None:
    """UserError if an adapter was trained on other weights: by a sample of them, or the name."""
    if BASE_SAMPLE in metadata:
        if metadata[BASE_SAMPLE] != base_sample(base):
            raise UserError(
                f"{files.path} is an adapter of other weights than those of {base_name}; it names "
                f"its base as {files.base_name!r:.150}."
            )
        return
    own, other = (name.rstrip("/").rpartition("/")[2] for name in (base_name, files.base_name))
    if other and own != other:
        raise UserError(
            f"{files.path} is an adapter of {files.base_name!r:.150}, not of {base_name}; name the "
            f"first, or change base_model_name_or_path in its {CONFIG_FILE} if they are the same."
        )


def _tensor(layer: int, module: str, leaf: str) -> str:
    return f"base_model.model.model.layers.{layer}.{module}.{LEAVES[leaf]}"
