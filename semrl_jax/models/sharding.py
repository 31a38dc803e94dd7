"""One table from parameter names to mesh axes, and the mesh itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from semrl_jax.errors import UserError

AXES = ("replica", "fsdp", "sequence", "tensor")
DATA_AXES = ("replica", "fsdp")

# Module name -> spec of its arrays; the leading None of a layer's array is the scanned stack.
# Kernels are [in, out]: the axis that the following product sums over goes to `fsdp` where the
# output is split by heads or features, and the other way round for the product that joins them.
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
    "layers/output/kernel": PartitionSpec(None, "tensor", "fsdp"),
    "layers/mlp_norm/scale": PartitionSpec(None, None),
    "layers/gate/kernel": PartitionSpec(None, "fsdp", "tensor"),
    "layers/up/kernel": PartitionSpec(None, "fsdp", "tensor"),
    "layers/down/kernel": PartitionSpec(None, "tensor", "fsdp"),
    "final_norm/scale": PartitionSpec(None),
    "head/kernel": PartitionSpec("fsdp", "tensor"),
}


def make_mesh(shape: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over the axes `AXES`; one axis may be -1 and takes the devices left over.

    Raises:
      UserError: if the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [shape[axis] for axis in AXES]
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise UserError(f"mesh={dict(shape)}: sizes are at least 1, and one at most is -1.")
    known = math.prod(size for size in sizes if size != -1)
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh={dict(shape)} needs {math.prod(sizes)} devices, but {len(devices)} are there; "
            "set config.mesh so that the product of its sizes is the number of devices."
        )
    # Auto: the compiler places what the table leaves open; jax.make_mesh defaults to explicit.
    return Mesh(np.array(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def parameter_shardings(params: Any, mesh: Mesh) -> Any:
    """The tree of `params` with each leaf's NamedSharding; every name must be in the table.

    Raises:
      UserError: if a mesh axis does not divide the dimension it splits.
    """

    def of(path, leaf):
        name = "/".join(str(key.key) for key in path)
        spec = PARTITION_SPECS[name]
        for size, axis in zip(leaf.shape, spec, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                raise UserError(
                    f"mesh.{axis}={mesh.shape[axis]} must divide the {size} rows of parameter "
                    f"{name} {tuple(leaf.shape)}; choose another mesh."
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(of, params)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over the data axes."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())
