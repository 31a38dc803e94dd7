"""Hugging Face model directories: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from semrl_jax.models import gguf
from semrl_jax.models.decoder_config import DecoderConfig
from semrl_jax.models.hf_config import config_from_hf, config_to_hf
from semrl_jax.models.hf_weights import (
    EMBEDDING,
    HEAD,
    FileTensor,
    Piece,
    file_tensors,
    iterate_hf_tensors,
    params_from_hf,
)
from semrl_jax.models.policy import Params
from semrl_jax.support.errors import UserError, disk_refusal
from semrl_jax.support.safe_files import check_regular, read_json_object, replacing_directory
from semrl_jax.support.tensor_files import write_tensors

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FILE_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# The files that are fetched from the hub: no code, no pickles, nothing from subfolders.
HUB_PATTERNS = ("*.json", "*.safetensors", "tokenizer.model", "merges.txt", "*.jinja")
# Tensors that are not parameters: tables of angles that older releases of transformers wrote.
IGNORED_TENSORS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
MAX_END_TOKENS = 1000
PIECE_BYTES = 2 * 2**20  # of float32 that are read at once; a few copies are held
NO_OTHERS: Mapping[str, tuple[int, ...]] = {}
NUM_SAMPLES, SAMPLE_BYTES = 64, 4096  # blocks of a file that `weights_sample` reads


def find_directory(path: str | os.PathLike[str]) -> pathlib.Path:
    """The local directory of a model: `path` itself, or the hub's snapshot of `owner/name`.

    A `.gguf` file, or a directory with one and without config.json, is converted at the first call.
    No code is fetched or run. UserError if there is no such directory, or the hub does not give it.
    """
    directory = pathlib.Path(path)
    if file := gguf.find_file(directory):
        return gguf.hf_directory(file)
    if directory.is_dir():
        return directory
    if directory.exists():
        raise UserError(f"model {str(path)!r} is a file, and no .gguf file; give its directory.")
    owner, _, name = str(path).partition("/")
    is_hub_id = all(re.fullmatch(r"\w[\w.-]*", part, re.ASCII) for part in (owner, name))
    # A missing directory inside an existing one is a mistake, not a model of the hub.
    if not is_hub_id or pathlib.Path(owner).exists():
        raise UserError(
            f"model directory {str(path)!r} does not exist; give a local Hugging Face directory "
            "or a hub id owner/name, or make one with python -m launch.prepare_model."
        )
    import huggingface_hub
    from huggingface_hub.errors import HTTPError  # of the HTTP library that the hub uses

    try:
        snapshot = huggingface_hub.snapshot_download(
            str(path), allow_patterns=list(HUB_PATTERNS), ignore_patterns=["*/*"]
        )
    except (HTTPError, OSError, ValueError, KeyError) as error:  # offline, or no valid answer
        reason = str(error).strip().partition("\n")[0][:200]
        raise UserError(
            f"model {str(path)!r} is no local directory, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {reason}); download it elsewhere and give its directory."
        ) from None
    return pathlib.Path(snapshot)


def load_config(path: str | os.PathLike[str], family: str = "") -> DecoderConfig:
    """Reads `config.json`, see `config_from_hf`; UserError if it is missing or not supported."""
    path = pathlib.Path(path)
    if not path.is_dir():
        raise UserError(f"model directory {str(path)!r} does not exist.")
    try:
        content = read_json_object(path / CONFIG_FILE)
    except FileNotFoundError:
        raise UserError(f"{path / CONFIG_FILE} is missing; a model directory has it.") from None
    if "run_id" in content:
        raise UserError(
            f"{str(path)!r} is the directory of a run, not of a model; make one of its checkpoint "
            f"with python -m launch.convert --source={path} --target=DIR and give DIR."
        )
    return config_from_hf(content, family)


def eos_token_ids(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Ids that end a response, of `generation_config.json`, else `config.json`; or UserError."""
    for name in (GENERATION_FILE, CONFIG_FILE):
        file = pathlib.Path(path) / name
        try:
            value = read_json_object(file).get("eos_token_id")
        except FileNotFoundError:
            continue
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if len(ids) > MAX_END_TOKENS or any(type(i) is not int or not 0 <= i < 2**31 for i in ids):
            raise UserError(
                f"{file}: eos_token_id={value!r:.100} must be a token id, below 2**31, or a list "
                f"of at most {MAX_END_TOKENS}."
            )
        return tuple(ids)
    return ()


def load_params(
    path: str | os.PathLike[str],
    config: DecoderConfig,
    shardings: Any = None,
    others: Mapping[str, tuple[int, ...]] = NO_OTHERS,
    dtype: str = "float32",
) -> Params:
    """Reads `model.safetensors`, or the shards of its index; UserError names wrong tensors.

    Float32 keeps all values exactly. Memory holds the parameters once, and a few pieces of
    `PIECE_BYTES`. `shardings`, from `parameter_shardings`, gives jax.Arrays, put on their devices
    piece by piece; None: NumPy arrays. `others`: see `check_params`.
    """
    files = check_params(path, config, others)
    pieces = _read_pieces(files, file_tensors(config, "float32"))
    return params_from_hf(pieces, config, shardings, dtype)


def check_params(
    path: str | os.PathLike[str],
    config: DecoderConfig,
    others: Mapping[str, tuple[int, ...]] = NO_OTHERS,
) -> dict[str, pathlib.Path]:
    """The file of each tensor that `load_params` reads; raises as it does.

    They may have the tensors of `others` in addition, with these shapes.
    """
    path = pathlib.Path(path)
    expected = {spec.name: spec.shape for spec, _ in file_tensors(config, "float32")}
    files = _weight_files(path, expected)
    problems = [f"{INDEX_FILE}: {name} is missing" for name in expected.keys() - files.keys()]
    heads = []  # files that repeat the embedding as output matrix
    for file in sorted(set(files.values())):
        with _open(file) as weights:
            found = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
            for name, tensor in found.items():
                if IGNORED_TENSORS.fullmatch(name):
                    continue
                is_tied = name == HEAD and config.tie_embeddings and name not in others
                wanted = expected.get(EMBEDDING if is_tied else name, others.get(name))
                shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
                if wanted is None:
                    problems.append(f"{file.name}: {name:.100} is not part of the model")
                elif shape != wanted:
                    problems.append(f"{file.name}: {name} has shape {shape}, not {wanted}")
                elif dtype not in FILE_DTYPES:
                    problems.append(
                        f"{file.name}: {name} is of dtype {dtype}, not of {tuple(FILE_DTYPES)}"
                    )
                elif is_tied:
                    heads.append(file)
            problems += [
                f"{file.name}: {name} is missing"
                for name in expected
                if files.get(name) == file and name not in found
            ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(f"{path}: {'; '.join(sorted(problems)[:5])}{more}.")
    for file in heads:
        _check_tied(file, files[EMBEDDING], expected[EMBEDDING])
    return files


def read_tensors(
    path: str | os.PathLike[str],
    config: DecoderConfig,
    others: Mapping[str, tuple[int, ...]],
    names: Sequence[str],
) -> dict[str, np.ndarray]:
    """The named tensors, if the directory has them, as float32; raises as `check_params`."""
    found = {}
    for file in sorted(set(check_params(path, config, others).values())):
        with _open(file) as weights:
            for name in set(names).intersection(weights.keys()):
                found[name] = weights.get_tensor(name).astype(np.float32)
    return found


def save_directory(
    path: str | os.PathLike[str],
    params: Params | Iterable[np.ndarray],
    config: DecoderConfig,
    tokenizer: Any,
    *,
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 10**9,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    base: Mapping[str, Any] | None = None,
) -> None:
    """Writes a directory for transformers, vLLM and `load_params`, completely or not at all.

    Args:
      path: replaced if it exists.
      params: parameters as `Policy.init` returns them, or the tensors of `tensor_specs` in their
        order and of `dtype`.
      tokenizer: a transformers tokenizer; None writes no tokenizer files.
      dtype: of the weights: "float32", "bfloat16" or "float16".
      max_shard_bytes: larger weights are written as several files and an index; the host holds
        one file at a time. A tensor is never split.
      eos_token_id, pad_token_id: written to both config files; None: what `base` has, else the
        tokenizer's, else none.
      base: `config.json` of the directory the parameters came from; its other fields are kept.

    Raises:
      UserError: for another dtype or size, or a `base` of another architecture.
      OSError: if the disk refuses it.
    """
    if dtype not in FILE_DTYPES.values():
        raise UserError(f"dtype={dtype!r} must be one of {tuple(FILE_DTYPES.values())}.")
    if max_shard_bytes < 1:
        raise UserError(f"max_shard_bytes={max_shard_bytes} must be at least 1.")
    base = base or {}
    special = {"eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    for name, given in special.items():
        values = (given, base.get(name), getattr(tokenizer, name, None))
        special[name] = next((value for value in values if value is not None), None)
    hf = config_to_hf(config, **special, base=base, dtype=dtype)
    generation = {name: hf[name] for name in special if hf[name] is not None}
    with replacing_directory(pathlib.Path(path)) as staging:
        try:
            _save_weights(staging, params, config, dtype, max_shard_bytes)
            _write_json(staging / CONFIG_FILE, hf)
            _write_json(staging / GENERATION_FILE, generation)
            if tokenizer is not None:
                _save_tokenizer(staging, tokenizer)
        except Exception as error:
            refusal = disk_refusal(error)
            if refusal is None or isinstance(error, OSError):
                raise
            raise OSError(refusal.errno, refusal.strerror, str(staging)) from error


def _weight_files(path: pathlib.Path, names: Iterable[str]) -> dict[str, pathlib.Path]:
    """The file of each tensor: the only file, or the one in the index."""
    if not path.is_dir():
        raise UserError(f"model directory {str(path)!r} does not exist.")
    if (path / WEIGHTS_FILE).is_file():
        return dict.fromkeys(names, path / WEIGHTS_FILE)
    index = path / INDEX_FILE
    if not index.is_file():
        pickles = sorted(file.name for pattern in ("*.bin", "*.pth") for file in path.glob(pattern))
        if pickles:
            raise UserError(
                f"{path} holds {pickles[0]} but no {WEIGHTS_FILE}: pickles are not read; convert "
                "it with transformers' save_pretrained(..., safe_serialization=True)."
            )
        raise UserError(f"{path}: {WEIGHTS_FILE} is missing, and so is {INDEX_FILE}.")
    file_names = read_json_object(index).get("weight_map")
    if not isinstance(file_names, dict) or not file_names:
        raise UserError(f"{index}: weight_map must map tensor names to files.")
    for tensor, name in file_names.items():
        # Only a name: an index must not lead to another directory.
        if not isinstance(name, str) or pathlib.PurePath(name).name != name:
            raise UserError(f"{index}: {tensor:.100} lies in {name!r:.100}, which is no file name.")
    for name in sorted(set(file_names.values())):
        if not (path / name).is_file():
            raise UserError(f"{path / name} is missing; {INDEX_FILE} lists it.")
    return {tensor: path / name for tensor, name in file_names.items()}


def _check_tied(
    head_file: pathlib.Path, embedding_file: pathlib.Path, shape: Sequence[int]
) -> None:
    """A file may hold a tied output matrix and the embedding, but they must be equal."""
    step = max(1, PIECE_BYTES // (4 * shape[1]))
    for start in range(0, shape[0], step):
        with _open(head_file) as head, _open(embedding_file) as embedding:
            rows = slice(start, min(start + step, shape[0]))
            a, b = (f.get_slice(n)[rows] for f, n in ((head, HEAD), (embedding, EMBEDDING)))
        if not np.array_equal(a, b):
            raise UserError(
                f"{head_file.name}: {HEAD} differs from {EMBEDDING}; set tie_word_embeddings=false."
            )


def weights_hash(path: str | os.PathLike[str]) -> str:
    """Hex SHA-256 over the names and bytes of a directory's safetensors files."""
    digest = hashlib.sha256()
    for file in sorted(pathlib.Path(path).glob("*.safetensors")):
        check_regular(file)
        with open(file, "rb") as content:
            digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def weights_sample(path: str | os.PathLike[str]) -> str:
    """Hex SHA-256 over names, sizes and a few blocks of safetensors files: fast, not complete."""
    digest = hashlib.sha256()
    for file in sorted(pathlib.Path(path).glob("*.safetensors")):
        check_regular(file)
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with open(file, "rb", buffering=0) as content:
            for i in range(NUM_SAMPLES):  # evenly spaced, the first and the last block included
                content.seek(max(0, size - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _read_pieces(
    files: Mapping[str, pathlib.Path], tensors: Sequence[FileTensor]
) -> Iterator[Piece]:
    """Every tensor in pieces of at most `PIECE_BYTES` of float32, or of one row."""
    for tensor in tensors:
        spec = tensor.spec
        file, num_rows = files[spec.name], spec.shape[0]
        step = max(1, PIECE_BYTES * num_rows // spec.num_bytes)
        for start in range(0, num_rows, step):
            # Opened per piece: pages of a file that stays mapped count as memory of this process.
            with _open(file) as weights:
                rows = weights.get_slice(spec.name)[start : min(start + step, num_rows)]
            yield from tensor.split(start, rows)


def _open(file: pathlib.Path) -> safe_open:
    """The file mapped into memory; UserError if it is incomplete or not a safetensors file."""
    try:
        check_regular(file)
        return safe_open(str(file), framework="numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read: {error}.") from None


def _save_tokenizer(directory: pathlib.Path, tokenizer: Any) -> None:
    """Saves as transformers does, but without the settings of how this tokenizer was loaded."""
    tokenizer.save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    for name in ("is_local", "local_files_only"):
        config.pop(name, None)
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def _save_weights(
    directory: pathlib.Path,
    params: Params | Iterable[np.ndarray],
    config: DecoderConfig,
    dtype: str,
    max_bytes: int,
) -> None:
    shards: list[list[FileTensor]] = [[]]
    num_bytes = 0
    for tensor in file_tensors(config, dtype):
        if shards[-1] and num_bytes + tensor.spec.num_bytes > max_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(tensor)
        num_bytes += tensor.spec.num_bytes
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [WEIGHTS_FILE]
    arrays = iter(params)
    if isinstance(params, Mapping):
        arrays = (array for _, array in iterate_hf_tensors(params, config, dtype))
    for name, shard in zip(names, shards):
        tensors = {spec.name: _joined([next(arrays) for _ in parts]) for spec, parts in shard}
        with open(directory / name, "xb") as out:
            write_tensors(out, tensors, {"format": "pt"})
        del tensors  # before the next shard's tensors are fetched
    if len(shards) > 1:
        total = sum(spec.num_bytes for shard in shards for spec, _ in shard)
        weight_map = {spec.name: name for name, shard in zip(names, shards) for spec, _ in shard}
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(directory / INDEX_FILE, content)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)


def _write_json(file: pathlib.Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
