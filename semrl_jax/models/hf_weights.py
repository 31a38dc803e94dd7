"""Converts the nested dict of stacked parameters to Hugging Face tensors and back."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from semrl_jax.models.decoder_config import DecoderConfig
from semrl_jax.models.hosts import start_copies, to_host
from semrl_jax.models.lora import (
    A,
    Adapted,
    B,
    merged,
    modules_with_adapters,
    on_layers,
    rank_of,
    stored,
    without_adapters,
)
from semrl_jax.models.pinned import fetched
from semrl_jax.models.policy import Params
from semrl_jax.models.sharding import parameter_shardings
from semrl_jax.types import Adapter, TensorSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
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
    ("attention_post_norm", "scale"): "post_self_attn_layernorm.weight",
    ("mlp_norm", "scale"): "post_attention_layernorm.weight",
    ("gate", "kernel"): "mlp.gate_proj.weight",
    ("up", "kernel"): "mlp.up_proj.weight",
    ("down", "kernel"): "mlp.down_proj.weight",
    ("router", "kernel"): "mlp.gate.weight",
    ("expert_gate", "kernel"): "mlp.experts.{expert}.gate_proj.weight",
    ("expert_up", "kernel"): "mlp.experts.{expert}.up_proj.weight",
    ("expert_down", "kernel"): "mlp.experts.{expert}.down_proj.weight",
    ("mlp_post_norm", "scale"): "post_mlp_layernorm.weight",
}
EMPTY: Mapping[str, int] = {}
TRANSPOSE_ROWS = 64  # written at once, so that their cache lines stay in the first-level cache


class Piece(NamedTuple):
    """Consecutive rows of a Hugging Face tensor, in any floating dtype."""

    name: str
    start: int  # of the first row
    rows: np.ndarray


class HfTensor(NamedTuple):
    """A tensor of Hugging Face, and which of our parameters holds it, transposed if a kernel.

    The matrices of an adapter are kernels too.
    """

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]  # of our parameter
    layer: int | None = None
    place: int | None = None  # of the layer in the stack of our parameter
    expert: int | None = None  # our parameter has all experts of a layer

    @property
    def is_kernel(self) -> bool:
        return self.path[-1] in ("kernel", A, B)

    @property
    def is_transposed_in_engine(self) -> bool:
        """Whether an engine keeps it transposed; it keeps a kernel of a layer as it comes."""
        return self.is_kernel and (self.layer is None or self.expert is not None)

    @property
    def index(self) -> tuple[int, ...]:
        """In the leading axes of our parameter."""
        return tuple(i for i in (self.place, self.expert) if i is not None)

    @property
    def engine_path(self) -> tuple[str | int, ...]:
        """Keys of our parameter in the tree of `unstacked`."""
        first, *names = self.path
        return self.path if self.layer is None else (first, self.layer, *names)


def hf_tensors(config: DecoderConfig) -> Iterator[HfTensor]:
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    kv_heads, inner = config.num_kv_heads * config.head_dim, config.intermediate_size
    family = config.declared
    shapes = {
        "attention_norm": (width,), "query": (heads, width), "key": (kv_heads, width),
        "value": (kv_heads, width), "output": (width, heads), "mlp_norm": (width,),
        "gate": (inner, width), "up": (inner, width), "down": (width, inner),
    }  # fmt: skip
    if family.query_key_norm:
        shapes |= {"query_norm": (config.head_dim,), "key_norm": (config.head_dim,)}
    if family.post_norms:
        shapes |= {"attention_post_norm": (width,), "mlp_post_norm": (width,)}
    if experts := config.experts:
        inner = experts.intermediate_size
        shapes |= {
            "router": (experts.num_experts, width), "expert_gate": (inner, width),
            "expert_up": (inner, width), "expert_down": (width, inner),
        }  # fmt: skip
    yield HfTensor(EMBEDDING, (config.vocab_size, width), ("embed", "embedding"))
    for layer in range(config.num_layers):
        for (module, kind), name in LAYER_NAMES.items():
            place = config.place(module, layer)
            has_bias = kind != "bias" or family.attention_bias
            if module not in shapes or place is None or not has_bias:
                continue
            if module in family.tensor_names:
                name = f"{family.tensor_names[module]}.{name.rpartition('.')[2]}"
            shape = shapes[module][:1] if kind == "bias" else shapes[module]
            name, path = f"model.layers.{layer}.{name}", ("layers", module, kind)
            if "{expert}" not in name:
                yield HfTensor(name, shape, path, layer, place)
                continue
            for expert in range(config.experts.num_experts):
                yield HfTensor(name.format(expert=expert), shape, path, layer, place, expert)
    yield HfTensor("model.norm.weight", (width,), ("final_norm", "scale"))
    if not config.tie_embeddings:
        yield HfTensor(HEAD, (config.vocab_size, width), ("head", "kernel"))


class Kernel(NamedTuple):
    """A linear module of a layer, by its Hugging Face name, such as "self_attn.q_proj"."""

    name: str
    shape: tuple[int, int]  # [out, in], as Hugging Face has it


def layer_kernels(config: DecoderConfig) -> dict[str, Kernel]:
    """The linear modules that all layers have, by our names. A mixture of experts is none."""
    prefix = "model.layers.0."
    kernels = [t for t in hf_tensors(config) if t.layer is not None and t.is_kernel]
    counts = collections.Counter(tensor.path[1] for tensor in kernels)
    return {
        tensor.path[1]: Kernel(tensor.name[len(prefix) : -len(".weight")], tensor.shape)
        for tensor in kernels
        if tensor.layer == 0 and tensor.expert is None and tensor.path[1] != "router"
        if counts[tensor.path[1]] == config.num_layers
    }


def adapter_tensors(config: DecoderConfig, adapter: Adapter) -> Iterator[HfTensor]:
    """The tensors of `Adapter.specs`, and which parameters of `adapted` hold them."""
    paths = {t.name: t.path for t in hf_tensors(config)}
    for spec in adapter.specs(tensor_specs(config, "float32")):
        module, leaf, _ = spec.name.rsplit(".", 2)
        path = (*paths[f"{module}.weight"][:-1], leaf.lower())
        layer = int(module.split(".")[2])
        yield HfTensor(spec.name, spec.shape, path, layer, place=layer)


def _tensors(config: DecoderConfig, adapter: Adapter | None) -> Iterator[HfTensor]:
    yield from hf_tensors(config)
    if adapter is not None:
        yield from adapter_tensors(config, adapter)


def adapter_of(params: Params, config: DecoderConfig) -> Adapter | None:
    """What the adapters in the result of `adapted` are; None if there are none."""
    modules = modules_with_adapters(params["layers"])
    if not modules:
        return None
    kernels = layer_kernels(config)
    return Adapter(rank_of(params), tuple(kernels[name].name for name in modules))


def tensor_specs(config: DecoderConfig, dtype: str) -> list[TensorSpec]:
    """Every tensor in streaming order: embedding, layers, final norm, output matrix."""
    return [TensorSpec(tensor.name, tensor.shape, dtype) for tensor in hf_tensors(config)]


class FileTensor(NamedTuple):
    """A tensor of a Hugging Face file: one of `tensor_specs`, or several that the family fuses."""

    spec: TensorSpec
    parts: tuple[TensorSpec, ...]  # by the names of `tensor_specs`; their rows follow each other

    def split(self, start: int, rows: np.ndarray) -> Iterator[Piece]:
        """Rows of the file's tensor as pieces of its parts."""
        end, first = start + len(rows), 0
        for part in self.parts:
            last = first + part.shape[0]
            low, high = max(start, first), min(end, last)
            if low < high:
                yield Piece(part.name, low - first, rows[low - start : high - start])
            first = last


def file_tensors(config: DecoderConfig, dtype: str) -> list[FileTensor]:
    """The tensors of files, in the order of `tensor_specs`."""
    fused = {m: name for name, modules in config.declared.fused.items() for m in modules}

    def place(tensor: HfTensor) -> tuple[int | None, str]:
        name = fused.get(tensor.path[1]) if tensor.layer is not None else None
        of_layer = f"model.layers.{tensor.layer}.{name}.{tensor.name.rpartition('.')[2]}"
        return tensor.layer, of_layer if name else tensor.name

    found = []
    for (_, name), tensors in itertools.groupby(hf_tensors(config), place):
        parts = tuple(TensorSpec(tensor.name, tensor.shape, dtype) for tensor in tensors)
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        found.append(FileTensor(TensorSpec(name, shape, dtype), parts))
    return found


def num_parameters(config: DecoderConfig, axes: Mapping[str, int] = EMPTY) -> int:
    """Numbers in all weights, or in those of one device, by the sizes of the mesh `axes`."""
    parts = axes.get("fsdp", 1) * axes.get("tensor", 1)
    numbers = {True: 0, False: 0}  # of experts, of the rest
    for tensor in hf_tensors(config):
        numbers[tensor.expert is not None] += math.prod(tensor.shape)
    return (numbers[True] // axes.get("expert", 1) + numbers[False]) // parts


def iterate_hf_tensors(
    params: Params, config: DecoderConfig, dtype: str, *, on_host: bool = True
) -> Iterator[tuple[TensorSpec, np.ndarray | Array]]:
    """Yields (spec, array) in the order of `tensor_specs`; two layers exist at a time.

    The devices prepare one layer while the caller uses the previous one. If other processes hold
    parts of the parameters, all processes must read it to its end. With `on_host` the arrays are
    NumPy's; else they stay on their devices, in one process. Parameters in the memory of the host
    are on their devices until the last array is made. Adapters are merged.
    """
    return _iterate(params, hf_tensors(config), dtype, on_host)


def iterate_base_tensors(
    params: Params, config: DecoderConfig, dtype: str, *, on_host: bool = True
) -> Iterator[tuple[TensorSpec, np.ndarray | Array]]:
    """`iterate_hf_tensors` of the base: adapters are left out."""
    return _iterate(without_adapters(params), hf_tensors(config), dtype, on_host)


def iterate_adapter_tensors(
    params: Params, config: DecoderConfig, *, on_host: bool = True
) -> Iterator[tuple[TensorSpec, np.ndarray | Array]]:
    """The tensors of `Adapter.specs`, in their order; for the rest as `iterate_hf_tensors`."""
    layers = params["layers"]
    own = {
        name: {leaf: layers[name][leaf] for leaf in (A, B)}
        for name in modules_with_adapters(layers)
    }
    tensors = adapter_tensors(config, adapter_of(params, config))
    return _iterate({"layers": own}, tensors, "float32", on_host)


def _iterate(
    params: Params, tensors: Iterable[HfTensor], dtype: str, on_host: bool
) -> Iterator[tuple[TensorSpec, np.ndarray | Array]]:
    params = fetched(params)

    def start(group: Sequence[HfTensor]) -> list[Array]:
        arrays = _hf_layout(
            {"/".join(t.path): stored(params, t.path) for t in group},
            {"/".join(tensor.path): tensor.place for tensor in group},
            parts=tuple(("/".join(t.path), t.expert, t.is_kernel) for t in group),
            dtype=dtype,
        )
        if on_host:
            start_copies(arrays)
        return arrays

    # One transfer per layer: the host never holds the whole stack.
    by_layer = itertools.groupby(tensors, lambda tensor: tensor.layer)
    groups = [list(group) for _, group in by_layer]
    ready = start(groups[0])
    for group, following in itertools.zip_longest(groups, groups[1:]):
        arrays, ready = ready, start(following) if following else []
        if on_host:
            arrays = map(np.ascontiguousarray, to_host(arrays))
        for tensor, array in zip(group, arrays):
            yield TensorSpec(tensor.name, tensor.shape, dtype), array


def iterate_engine_tensors(
    params: Params, config: DecoderConfig, adapter: Adapter | None = None
) -> Iterator[tuple[TensorSpec, Array]]:
    """Yields (spec, array) of an engine's parameters, see `UnstackedParams`, in their dtypes."""
    for tensor in _tensors(config, adapter):
        leaf = functools.reduce(operator.getitem, tensor.engine_path, params)
        leaf = leaf if tensor.expert is None else leaf[tensor.expert]
        leaf = leaf.T if tensor.is_transposed_in_engine else leaf
        yield TensorSpec(tensor.name, tensor.shape, leaf.dtype.name), leaf


@functools.partial(jax.jit, static_argnames=("parts", "dtype"))
def _hf_layout(
    leaves: Mapping[str, Array | Adapted],
    places: Mapping[str, int | Int[Array, ""] | None],
    *,
    parts: tuple[tuple[str, int | None, bool], ...],
    dtype: str,
) -> list[Array]:
    """Parameters of one layer, as in Hugging Face; `places` in the stacks, `parts` of tensors."""

    def at(place, leaf):
        if place is None:
            return leaf
        index = functools.partial(jax.lax.dynamic_index_in_dim, index=place, keepdims=False)
        return jax.tree.map(index, leaf)

    of_layer = {name: at(places[name], leaf) for name, leaf in leaves.items()}
    found = []
    for name, expert, is_transposed in parts:
        array = merged(of_layer[name])
        array = array if expert is None else array[expert]
        found.append((array.T if is_transposed else array).astype(jnp.dtype(dtype)))
    return found


def params_from_hf(
    pieces: Iterable[Piece], config: DecoderConfig, shardings: Any = None, dtype: str = "float32"
) -> Params:
    """Parameters from every row of every tensor of `tensor_specs`; values are only cast.

    Memory holds the parameters and a few copies of one piece. With `shardings`, each process fills
    the parts on its own devices; None: NumPy.
    """
    tensors = {tensor.name: tensor for tensor in hf_tensors(config)}
    shapes: dict[tuple[str, ...], tuple[int, ...]] = {}
    for tensor in tensors.values():  # the last of a parameter has the largest index
        shape = tensor.shape[::-1] if tensor.is_kernel else tensor.shape
        shapes[tensor.path] = (*(i + 1 for i in tensor.index), *shape)
    leaves: dict[tuple[str, ...], _HostLeaf | _DeviceLeaf]
    if shardings is None:
        leaves = {path: _HostLeaf(shape, dtype) for path, shape in shapes.items()}
    else:
        # One program for all: each compiled program costs about 1 MB and 20 ms.
        zeros = jax.jit(
            lambda: [jnp.zeros(shape, dtype) for shape in shapes.values()],
            out_shardings=[functools.reduce(operator.getitem, p, shardings) for p in shapes],
        )()
        leaves = {path: _DeviceLeaf(array) for path, array in zip(shapes, zeros)}
        del zeros  # its buffers are the leaves' parts
    for name, start, rows in pieces:
        tensor = tensors[name]
        leaves[tensor.path].put(tensor.index, start, rows, transpose=tensor.is_kernel)
    return unflatten_dict({path: leaf.finish() for path, leaf in leaves.items()})


class _HostLeaf:
    """One parameter in host memory."""

    def __init__(self, shape: tuple[int, ...], dtype: str):
        self._array = np.empty(shape, jnp.dtype(dtype))

    def put(self, index: tuple[int, ...], start: int, rows: np.ndarray, *, transpose: bool) -> None:
        target = self._array[index].T if transpose else self._array[index]
        step = TRANSPOSE_ROWS if transpose else len(rows)
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            target[start + first : start + first + len(some)] = some

    def finish(self) -> np.ndarray:
        return self._array


class _DeviceLeaf:
    """One parameter on this process's devices; the parts are filled one by one, in place."""

    def __init__(self, zeros: jax.Array):
        self._shape, self._sharding = zeros.shape, zeros.sharding
        self._parts = {shard.device: shard.data for shard in zeros.addressable_shards}
        self._bounds = {
            shard.device: [axis.indices(n)[:2] for axis, n in zip(shard.index, zeros.shape)]
            for shard in zeros.addressable_shards
        }

    def put(self, index: tuple[int, ...], start: int, rows: np.ndarray, *, transpose: bool) -> None:
        for device, bounds in self._bounds.items():
            leading, axes = bounds[: len(index)], bounds[len(index) :]
            if any(not low <= i < high for i, (low, high) in zip(index, leading, strict=True)):
                continue
            first = [i - low for i, (low, _) in zip(index, leading, strict=True)]
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


class UnstackedParams:
    """Parameters of an engine, see `unstacked`, while their tensors come; for one thread.

    `dtype` is of all parameters but the scales of norms, which stay in float32.
    """

    def __init__(
        self, config: DecoderConfig, shardings: Any, dtype: str, adapter: Adapter | None = None
    ):
        self._tensors = {tensor.name: tensor for tensor in _tensors(config, adapter)}
        self._shardings, self._dtype = shardings, dtype
        if adapter is not None:
            mesh = shardings["final_norm"]["scale"].mesh
            own = parameter_shardings(_unstacked_shapes(config, adapter), mesh)
            layers = on_layers(shardings["layers"], own["layers"])
            self._shardings = shardings | {"layers": layers}
        self._num_layers = config.num_layers
        self._leaves: dict[str, Array] = {}

    def layer_of(self, name: str) -> int | None:
        return self._tensors[name].layer

    def put(self, arrays: Mapping[str, np.ndarray | Array]) -> list[Array]:
        """Puts whole tensors on the devices; returns them as they came, before the copies end."""
        targets, shardings = [], []  # how the tensors come, and how they are kept
        for name in arrays:
            tensor = self._tensors[name]
            sharding = functools.reduce(operator.getitem, tensor.engine_path, self._shardings)
            if tensor.expert is not None:
                sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
            dtype = "float32" if tensor.path[-1] == "scale" else self._dtype
            changes = tensor.is_transposed_in_engine
            targets.append(_Target(changes, dtype, sharding))
            # Each device receives its own part of the tensor as it was sent.
            shardings.append(_transposed(sharding) if changes else sharding)
        placed = jax.device_put(list(arrays.values()), shardings)
        self._leaves |= zip(arrays, _engine_layout(placed, targets=tuple(targets)))
        return placed

    def wait(self) -> None:
        """Waits until every array that was put has been copied."""
        jax.block_until_ready(self._leaves)

    def finish(self, base: Params | None = None) -> Params:
        """The parameters; `base` are an engine's earlier ones, if only those of an adapter came."""
        self.wait()
        experts: dict[HfTensor, list[Array]] = {}  # by the first one of a parameter
        for name, tensor in self._tensors.items():
            if tensor.expert is not None and name in self._leaves:
                first = tensor._replace(name="", expert=None)
                experts.setdefault(first, []).append(self._leaves.pop(name))
        together = {first: _joined(experts.pop(first)) for first in list(experts)}
        leaves = {self._tensors[name]: leaf for name, leaf in self._leaves.items()} | together
        params = unflatten_dict({tensor.engine_path: leaf for tensor, leaf in leaves.items()})
        layers = tuple(params["layers"][layer] for layer in range(self._num_layers))
        if base is not None:
            params, layers = base, on_layers(base["layers"], layers)
        return params | {"layers": layers}


def _unstacked_shapes(config: DecoderConfig, adapter: Adapter) -> Params:
    """Shapes of the matrices of an adapter in an engine."""
    layers: list[dict[str, dict[str, Any]]] = [{} for _ in range(config.num_layers)]
    for tensor in adapter_tensors(config, adapter):
        _, module, leaf = tensor.path
        shape = jax.ShapeDtypeStruct(tensor.shape, jnp.float32)
        layers[tensor.layer].setdefault(module, {})[leaf] = shape
    return {"layers": tuple(layers)}


@jax.jit
def _joined(experts: Sequence[Array]) -> Array:
    return jnp.stack(experts)


def _transposed(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*reversed(sharding.spec)))


class _Target(NamedTuple):
    """How an engine keeps a tensor."""

    is_transposed: bool
    dtype: str
    sharding: NamedSharding


@functools.partial(jax.jit, static_argnames="targets")
def _engine_layout(arrays: Sequence[Array], *, targets: tuple[_Target, ...]) -> list[Array]:
    """The arrays in memory of their own, also where they lie in the caller's on a CPU."""
    return [
        jax.lax.with_sharding_constraint(
            (array.T if target.is_transposed else array).astype(target.dtype), target.sharding
        )
        for array, target in zip(arrays, targets, strict=True)
    ]
