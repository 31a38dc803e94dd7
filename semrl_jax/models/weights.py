"""Converts our stacked nested dict to Hugging Face tensors and back, one layer at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Int

from semrl_jax.models.config import DecoderConfig
from semrl_jax.models.hosts import to_host
from semrl_jax.models.policy import Params
from semrl_jax.types import TensorSpec

# Ours (below "layers") -> Hugging Face (below "model.layers.<i>."); kernels are transposed.
LAYER_NAMES = {
    ("attention_norm", "scale"): "input_layernorm.weight",
    ("query", "kernel"): "self_attn.q_proj.weight",
    ("query", "bias"): "self_attn.q_proj.bias",
    ("key", "kernel"): "self_attn.k_proj.weight",
    ("key", "bias"): "self_attn.k_proj.bias",
    ("value", "kernel"): "self_attn.v_proj.weight",
    ("value", "bias"): "self_attn.v_proj.bias",
    ("query_norm", "scale"): "self_attn.q_norm.weight",
    ("key_norm", "scale"): "self_attn.k_norm.weight",
    ("output", "kernel"): "self_attn.o_proj.weight",
    ("mlp_norm", "scale"): "post_attention_layernorm.weight",
    ("gate", "kernel"): "mlp.gate_proj.weight",
    ("up", "kernel"): "mlp.up_proj.weight",
    ("down", "kernel"): "mlp.down_proj.weight",
}
TRANSPOSE_ROWS = 64  # written at once, so that their cache lines stay in the first-level cache


class Piece(NamedTuple):
    """Consecutive rows of a Hugging Face tensor, in any floating dtype."""

    name: str
    start: int  # of the first row
    rows: np.ndarray


def numpy_dtype(name: str) -> np.dtype:
    """NumPy dtype by name, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def tensor_specs(config: DecoderConfig, dtype: str) -> list[TensorSpec]:
    """Every tensor in streaming order: embedding, layers, final norm, output matrix."""
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    kv_heads, inner = config.num_kv_heads * config.head_dim, config.intermediate_size
    shapes = {
        "attention_norm": (width,), "query": (heads, width), "key": (kv_heads, width),
        "value": (kv_heads, width), "query_norm": (config.head_dim,),
        "key_norm": (config.head_dim,), "output": (width, heads), "mlp_norm": (width,),
        "gate": (inner, width), "up": (inner, width), "down": (width, inner),
    }  # fmt: skip
    specs = [TensorSpec("model.embed_tokens.weight", (config.vocab_size, width), dtype)]
    for layer in range(config.num_layers):
        for (module, kind), name in _layer_names(config).items():
            shape = shapes[module][:1] if kind == "bias" else shapes[module]
            specs.append(TensorSpec(f"model.layers.{layer}.{name}", shape, dtype))
    specs.append(TensorSpec("model.norm.weight", (width,), dtype))
    if not config.tie_embeddings:
        specs.append(TensorSpec("lm_head.weight", (config.vocab_size, width), dtype))
    return specs


def iterate_hf_tensors(
    params: Params, config: DecoderConfig, dtype: str
) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """Yields (spec, array) in the order of `tensor_specs`; one layer on the host at a time.

    If other processes hold parts of the parameters, all processes must read it to its end.
    """
    specs = iter(tensor_specs(config, dtype))
    target = numpy_dtype(dtype)

    def emit(array, transpose=False):
        host = to_host(array)
        host = host.T if transpose else host
        return next(specs), np.ascontiguousarray(host, dtype=target)

    yield emit(params["embed"]["embedding"])
    for layer in range(config.num_layers):
        # One transfer per layer: the host never holds the whole stack.
        arrays = to_host(
            {key: params["layers"][key[0]][key[1]][layer] for key in _layer_names(config)}
        )
        for key in _layer_names(config):
            yield emit(arrays[key], transpose=key[1] == "kernel")
    yield emit(params["final_norm"]["scale"])
    if not config.tie_embeddings:
        yield emit(params["head"]["kernel"], transpose=True)


def params_from_hf(pieces: Iterable[Piece], config: DecoderConfig, shardings: Any = None) -> Params:
    """Float32 parameters from the rows of Hugging Face tensors; values are only cast.

    Memory is allocated once and filled piece by piece, so it holds the parameters and a few copies
    of one piece.

    Args:
      pieces: every row of every tensor of `tensor_specs`, in any order. The caller checks names
        and shapes.
      config: the architecture.
      shardings: the tree from `parameter_shardings`; None keeps the parameters on the host.

    Returns:
      NumPy arrays; with `shardings`, jax.Arrays. Each process fills the parts on its own devices.
    """
    places = _places(config)
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for spec in tensor_specs(config, "float32"):
        path, layer = places[spec.name]
        shape = spec.shape[::-1] if path[-1] == "kernel" else spec.shape
        shapes[path] = shape if layer is None else (config.num_layers, *shape)
    leaves: dict[tuple[str, ...], _HostLeaf | _DeviceLeaf]
    if shardings is None:
        leaves = {path: _HostLeaf(shape) for path, shape in shapes.items()}
    else:
        of_path = {p: functools.reduce(lambda d, k: d[k], p, shardings) for p in shapes}
        # One program for all: each compiled program costs about 1 MB and 20 ms.
        zeros = jax.jit(
            lambda: [jnp.zeros(shape, jnp.float32) for shape in shapes.values()],
            out_shardings=list(of_path.values()),
        )()
        leaves = {path: _DeviceLeaf(array) for path, array in zip(shapes, zeros)}
        del zeros  # its buffers are the leaves' parts
    for name, start, rows in pieces:
        path, layer = places[name]
        leaves[path].put(layer, start, rows, transpose=path[-1] == "kernel")
    params: Params = {}
    for path, leaf in leaves.items():
        node = functools.reduce(lambda d, k: d.setdefault(k, {}), path[:-1], params)
        node[path[-1]] = leaf.finish()
    return params


class _HostLeaf:
    """One parameter in host memory."""

    def __init__(self, shape: tuple[int, ...]):
        self._array = np.empty(shape, np.float32)

    def put(self, layer: int | None, start: int, rows: np.ndarray, *, transpose: bool) -> None:
        target = self._array if layer is None else self._array[layer]
        if transpose:
            target = target.T
        step = TRANSPOSE_ROWS if transpose else len(rows)
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            target[start + first : start + first + len(some)] = some

    def finish(self) -> np.ndarray:
        return self._array


class _DeviceLeaf:
    """One parameter on this process's devices; each device's part starts as zeros.

    The parts are filled one by one, in place. On one sharded array, the compiler could run a
    program on a gathered copy.
    """

    def __init__(self, zeros: jax.Array):
        self._shape, self._sharding = zeros.shape, zeros.sharding
        self._parts = {shard.device: shard.data for shard in zeros.addressable_shards}
        self._bounds = {
            shard.device: [
                axis.indices(size)[:2] for axis, size in zip(shard.index, zeros.shape, strict=True)
            ]
            for shard in zeros.addressable_shards
        }

    def put(self, layer: int | None, start: int, rows: np.ndarray, *, transpose: bool) -> None:
        for device, bounds in self._bounds.items():
            first, axes = [], bounds
            if layer is not None:
                (low, high), axes = bounds[0], bounds[1:]
                if not low <= layer < high:
                    continue
                first = [layer - low]
            axes = axes[::-1] if transpose else axes  # as the rows have them
            (low, high), *others = axes
            begin, end = max(start, low), min(start + len(rows), high)
            if begin >= end:
                continue
            block = rows[(slice(begin - start, end - start), *(slice(*axis) for axis in others))]
            corner = [begin - low, *(0 for _ in others)]
            first += corner[::-1] if transpose else corner
            self._parts[device] = _put_block(
                self._parts[device],
                jax.device_put(block, device),
                jax.device_put(np.array(first, np.int32), device),
                transpose=transpose,
            )
        # Wait, or pieces would be read faster than devices take them and fill the memory.
        jax.block_until_ready(list(self._parts.values()))

    def finish(self) -> jax.Array:
        return jax.make_array_from_single_device_arrays(
            self._shape, self._sharding, list(self._parts.values())
        )


@functools.partial(jax.jit, static_argnames="transpose", donate_argnames="part")
def _put_block(part: Array, block: Array, first: Int[Array, " axes"], *, transpose: bool) -> Array:
    """Writes a block at the element `first` of a part; casts it and adds leading axes if needed."""
    block = (block.T if transpose else block).astype(part.dtype)
    block = block.reshape((1,) * (part.ndim - block.ndim) + block.shape)
    return jax.lax.dynamic_update_slice(part, block, list(first))


def _layer_names(config: DecoderConfig) -> dict[tuple[str, str], str]:
    def has(module: str, kind: str) -> bool:
        if module in ("query_norm", "key_norm"):
            return config.query_key_norm
        return kind != "bias" or config.attention_bias

    return {key: name for key, name in LAYER_NAMES.items() if has(*key)}


def _places(config: DecoderConfig) -> dict[str, tuple[tuple[str, ...], int | None]]:
    """Hugging Face name -> path of our parameter, and the layer of its stack."""
    places: dict[str, tuple[tuple[str, ...], int | None]] = {
        "model.embed_tokens.weight": (("embed", "embedding"), None),
        "model.norm.weight": (("final_norm", "scale"), None),
        "lm_head.weight": (("head", "kernel"), None),
    }
    for layer in range(config.num_layers):
        for key, name in _layer_names(config).items():
            places[f"model.layers.{layer}.{name}"] = (("layers", *key), layer)
    return places
