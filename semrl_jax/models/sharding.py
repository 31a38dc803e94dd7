"""One table from parameter names to mesh axes, one of activations, and the mesh itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Shaped

from semrl_jax.models.decoder_config import DecoderConfig
from semrl_jax.models.lora import A, B
from semrl_jax.support.errors import UserError

AXES = ("replica", "fsdp", "sequence", "tensor", "expert")
DATA_AXES = ("replica", "fsdp", "expert")

# Module name -> spec of its arrays; the leading None of a layer's array is the scanned stack.
# Kernels are [in, out]. Where the output is split by heads or features, the input axis goes to
# `fsdp`. The products that sum over heads or features have all on the input axis: TPUs store the
# output axis in tiles of 128. They cannot gather smaller parts of a tile, and cannot scatter sums
# into them. They then sum whole kernels, which sends twice as much and keeps all parts in memory.
PARTITION_SPECS: Mapping[str, PartitionSpec] = {
    "embed/embedding": PartitionSpec("tensor", "fsdp"),
    "layers/attention_norm/scale": PartitionSpec(None, None),
    "layers/query/kernel": PartitionSpec(None, "fsdp", "tensor"),
    "layers/query/bias": PartitionSpec(None, "tensor"),
    "layers/key/kernel": PartitionSpec(None, "fsdp", "tensor"),
    "layers/key/bias": PartitionSpec(None, "tensor"),
    "layers/value/kernel": PartitionSpec(None, "fsdp", "tensor"),
    "layers/value/bias": PartitionSpec(None, "tensor"),
    "layers/query_norm/scale": PartitionSpec(None, None),
    "layers/key_norm/scale": PartitionSpec(None, None),
    "layers/output/kernel": PartitionSpec(None, ("tensor", "fsdp"), None),
    "layers/attention_post_norm/scale": PartitionSpec(None, None),
    "layers/mlp_norm/scale": PartitionSpec(None, None),
    "layers/mlp_post_norm/scale": PartitionSpec(None, None),
    "layers/gate/kernel": PartitionSpec(None, "fsdp", "tensor"),
    "layers/up/kernel": PartitionSpec(None, "fsdp", "tensor"),
    "layers/down/kernel": PartitionSpec(None, ("tensor", "fsdp"), None),
    "layers/router/kernel": PartitionSpec(None, "fsdp", None),
    "layers/expert_gate/kernel": PartitionSpec(None, "expert", "fsdp", "tensor"),
    "layers/expert_up/kernel": PartitionSpec(None, "expert", "fsdp", "tensor"),
    "layers/expert_down/kernel": PartitionSpec(None, "expert", "tensor", "fsdp"),
    "final_norm/scale": PartitionSpec(None),
    "head/kernel": PartitionSpec("fsdp", "tensor"),
    "value_head/kernel": PartitionSpec(None),
    "value_head/bias": PartitionSpec(),
}

# Rows over the data axes, tokens over `sequence`, heads, features and the vocabulary over `tensor`.
# The residual stream is not split over `tensor`.
ACTIVATION_SPECS: Mapping[str, PartitionSpec] = {
    "tokens": PartitionSpec(DATA_AXES, "sequence"),  # [B, S]
    "states": PartitionSpec(DATA_AXES, "sequence", None),  # [B, S, D]
    "heads": PartitionSpec(DATA_AXES, "sequence", "tensor", None),  # [B, S, N, H]
    "features": PartitionSpec(DATA_AXES, "sequence", "tensor"),  # [B, S, F]
    "logits": PartitionSpec(DATA_AXES, "tensor"),  # [B, V]
    "cache": PartitionSpec(DATA_AXES, "tensor", None, None),  # [B, K, H, S] or [B, K, S, H]
    # A device looks up its slice of the embedding's width for the rows of all of `fsdp`: token ids
    # and states travel, the table does not.
    "looked_up_tokens": PartitionSpec(("replica", "expert"), "sequence"),  # [B, S]
    "looked_up": PartitionSpec(("replica", "expert"), "sequence", "fsdp"),  # [B, S, D]
}


def make_mesh(shape: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over `AXES`; one may be -1: the remaining devices. UserError if it does not fit."""
    asked = jax.config.jax_platforms or "cpu"
    if jax.default_backend() == "cpu" != asked.partition(",")[0]:  # JAX leaves out missing GPUs
        raise UserError(
            f"JAX_PLATFORMS={asked!r} must name devices that this process sees, but there is only "
            "the CPU; check CUDA_VISIBLE_DEVICES and the driver, or unset it."
        )
    devices = list(jax.devices() if devices is None else devices)
    sizes = [shape.get(axis, 1) for axis in AXES]
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise UserError(f"mesh={dict(shape)}: sizes are at least 1, and one at most is -1.")
    known = math.prod(size for size in sizes if size != -1)
    # At least 1, or the message below would ask for 0 devices.
    sizes = [max(1, len(devices) // known) if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh={dict(shape)} needs {math.prod(sizes)} devices, but {len(devices)} are there."
        )
    # Auto: the compiler places what the table does not say; jax.make_mesh defaults to explicit.
    return Mesh(np.array(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def partition_spec(name: str) -> PartitionSpec:
    """The entry of a parameter; adapters are split as the rows and columns of their kernel."""
    module, _, leaf = name.rpartition("/")
    if leaf not in (A, B):
        return PARTITION_SPECS[name]
    stack, rows, columns = PARTITION_SPECS[f"{module}/kernel"]
    return PartitionSpec(stack, rows, None) if leaf == A else PartitionSpec(stack, None, columns)


def parameter_shardings(params: Any, mesh: Mesh) -> Any:
    """The NamedSharding of each leaf, by its name; UserError if an axis does not divide it."""

    def of(path, leaf):
        name = "/".join(str(key.key) for key in path if hasattr(key, "key"))
        spec = partition_spec(name)
        if len(spec) > leaf.ndim:  # of one layer of an engine, see `policy.unstacked`
            spec = PartitionSpec(*spec[1:])
            if leaf.ndim == 2:
                spec = PartitionSpec(*reversed(spec))
        for size, axes in zip(leaf.shape, spec, strict=True):
            if size % math.prod(mesh.shape[axis] for axis in axis_names(axes)):
                sizes = " * ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in axis_names(axes))
                raise UserError(
                    f"{sizes} must divide the {size} rows of {name}; choose another mesh."
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(of, params)


def axis_names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that one entry of a partition spec names."""
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def check_mesh(config: DecoderConfig, mesh: Mesh) -> None:
    """UserError unless the decoder can be split over the mesh; KV heads need not be."""
    divided = {
        "tensor": {
            "num_heads": config.num_heads,
            "num_kv_heads * head_dim": config.num_kv_heads * config.head_dim,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
        },
        "fsdp": {"hidden_size": config.hidden_size},
    }
    tensor, is_dense = mesh.shape["tensor"], config.experts is None or config.experts.dense_layers
    inner = config.intermediate_size if is_dense else 0
    if tensor == 1 or config.num_heads % tensor == inner % tensor == 0:
        divided["fsdp"]["num_heads * head_dim / mesh.tensor"] = (
            config.num_heads * config.head_dim // tensor
        )
        if is_dense:
            divided["fsdp"]["intermediate_size / mesh.tensor"] = inner // tensor
    if config.experts is not None:
        divided["expert"] = {"num_experts": config.experts.num_experts}
        divided["tensor"]["width of an expert"] = config.experts.intermediate_size
        if not is_dense:
            del divided["tensor"]["intermediate_size"]
    elif mesh.shape["expert"] > 1:
        raise UserError("mesh.expert splits experts, and the model has none; set it to 1.")
    for axis, sizes in divided.items():
        common = math.gcd(*sizes.values())
        for name, size in sizes.items():
            if size % mesh.shape[axis]:
                allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
                raise UserError(
                    f"mesh.{axis}={mesh.shape[axis]} must divide {name}={size}; {allowed} fit."
                )


def platform_of(mesh: Mesh | None) -> str:
    """Platform of the devices of a mesh; without a mesh, JAX's default."""
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def activation_spec(kind: str, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """The spec of `ACTIVATION_SPECS` without the axes that do not divide their dimension."""
    spec = ACTIVATION_SPECS[kind]

    def fitting(size, axes):
        return None if size % math.prod(mesh.shape[name] for name in axis_names(axes)) else axes

    return PartitionSpec(*(fitting(*pair) for pair in zip(shape, spec, strict=True)))


def constrain(x: Shaped[Array, "*dims"], kind: str, mesh: Mesh | None) -> Shaped[Array, "*dims"]:
    """`x` with the layout of its kind of activation; unchanged without a mesh."""
    if mesh is None:
        return x
    spec = activation_spec(kind, x.shape, mesh)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def shared_heads(
    x: Float[Array, ...], num_heads: int, mesh: Mesh | None, kind: str = "heads"
) -> Float[Array, ...]:
    """Keys or values ("heads" or "cache") with one head per query head, if they cannot be split."""
    axis = ACTIVATION_SPECS[kind].index("tensor")
    if mesh is None or x.shape[axis] % mesh.shape["tensor"] == 0:
        return x
    return constrain(jnp.repeat(x, num_heads // x.shape[axis], axis=axis), kind, mesh)


def gather_kernel(
    kernel: Float[Array, "I O"], spec: PartitionSpec, mesh: Mesh
) -> Float[Array, "I O"]:
    """A kernel as its product needs it: gathered over `fsdp`, still split over `tensor`.

    The parts are gathered as they are stored, next to each other, and joined on the device. TPUs
    have tiles of 16 rows. If the parts do not fill them, joining is a copy, and the compiler of v5p
    makes the gather a sum of whole arrays (docs/plan.md). `spec` is of the kernel's two axes.
    """
    whole, is_split = _without_fsdp(spec)
    if not is_split or mesh.shape["fsdp"] == 1:
        return kernel

    def of_shard(own):
        parts = jax.lax.all_gather(own, "fsdp", axis=0)  # [fsdp, I, O]
        return parts.reshape(-1, own.shape[1])

    # JAX does not infer that gathered values are the same on all devices.
    return jax.shard_map(
        of_shard, mesh=mesh, in_specs=spec, out_specs=whole, check_vma=False
    )(kernel)  # fmt: skip


def gather_over_fsdp(
    kernel: Float[Array, "*E I O"], name: str, mesh: Mesh | None
) -> Float[Array, "*E I O"]:
    """The kernel of a module of experts, gathered; its gradient is summed and split again."""
    if mesh is None or mesh.shape["fsdp"] == 1:
        return kernel
    split = PartitionSpec(*PARTITION_SPECS[f"layers/{name}/kernel"][1:])
    whole = PartitionSpec(*(None if axis == "fsdp" else axis for axis in split))
    # Two constraints: the first one puts the cast before the gather. In the gradient it puts the
    # slice after the sum, which compilers for accelerators merge into a reduce-scatter.
    for spec in (split, whole):
        kernel = jax.lax.with_sharding_constraint(kernel, NamedSharding(mesh, spec))
    return kernel


def kernel_gradient(
    x: Float[Array, "B T I"], gradient: Float[Array, "B T O"], spec: PartitionSpec, mesh: Mesh
) -> Float[Array, "I O"]:
    """The gradient of a kernel, with the layout of the kernel: its sums are reduce-scattered.

    Without this, compilers sum whole gradients over all devices and slice them, which sends twice
    the bytes. TPU compilers still do if `fsdp` is the whole slice.
    """
    whole, is_split = _without_fsdp(spec)
    data = PartitionSpec(DATA_AXES, "sequence")
    num_parts = mesh.shape["fsdp"]

    def of_shard(x, gradient):
        own = jax.lax.dot_general(x, gradient, (((0, 1), (0, 1)), ((), ())))
        if not is_split:
            return jax.lax.psum(own, (*DATA_AXES, "sequence"))
        if num_parts > 1:
            parts = own.reshape(num_parts, -1, own.shape[1])
            own = jax.lax.psum_scatter(parts, "fsdp", scatter_dimension=0)
        return jax.lax.psum(own, (*(axis for axis in DATA_AXES if axis != "fsdp"), "sequence"))

    return jax.shard_map(
        of_shard,
        mesh=mesh,
        in_specs=(PartitionSpec(*data, whole[0]), PartitionSpec(*data, whole[1])),
        out_specs=spec,
        check_vma=False,
    )(x, gradient)


def splits_rows(x: Float[Array, "B T I"], mesh: Mesh) -> bool:
    """Whether every device of the data and sequence axes has as many rows and columns."""
    rows = math.prod(mesh.shape[axis] for axis in DATA_AXES)
    return x.shape[0] % rows == 0 and x.shape[1] % mesh.shape["sequence"] == 0


def _without_fsdp(spec: PartitionSpec) -> tuple[PartitionSpec, bool]:
    """The spec of a gathered kernel, and whether `fsdp` splits it."""
    first, second = spec
    kept = tuple(axis for axis in axis_names(first) if axis != "fsdp")
    return PartitionSpec(kept or None, second), "fsdp" in axis_names(first)
