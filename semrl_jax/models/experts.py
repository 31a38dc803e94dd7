"""Mixtures of experts: the router, and a dispatch that drops no token.

The tokens of each expert are put next to each other, and each expert's kernels are multiplied with
its own rows only. On a mesh, the axis `expert` splits the experts. Its devices gather each other's
tokens, compute their own experts' part of every token, and sum the parts where the tokens came
from.

Source: arXiv:2211.15841 for the blocks of rows, each of one expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from semrl_jax.models.decoder_config import Experts
from semrl_jax.models.sharding import activation_spec, axis_names, platform_of

SMALLEST_BLOCK, LARGEST_BLOCK = 8, 128  # rows


class Kernels(NamedTuple):
    """Kernels of one layer, in the compute dtype; all experts, or those of this device."""

    router: Float[Array, "D E"]
    gate: Float[Array, "X D F"]
    up: Float[Array, "X D F"]
    down: Float[Array, "X F D"]


def mixture(
    x: Float[Array, "B S D"],
    kernels: Kernels,
    experts: Experts,
    activation: Callable[[Array], Array],
    mesh: Mesh | None,
) -> Float[Array, "B S D"]:
    """The weighted sum of the outputs of each token's experts; padding is routed as well."""
    if mesh is None:
        return _own_part(x, kernels, experts, activation, 0, jax.default_backend())
    platform = platform_of(mesh)
    spec = activation_spec("states", x.shape, mesh)
    # Few rows are not split over the data axes: then every device has them.
    splits_rows = spec[0] is not None
    of_x = {name for axes in spec for name in axis_names(axes)}

    def of_shard(x, kernels):
        # The gradients of `block_product` vary over the same axes as what they are of.
        x = _varying(x, {"expert", "tensor"} - of_x)
        own = (_varying(kernel, of_x - {"expert"}) for kernel in kernels[1:])
        kernels = Kernels(kernels.router, *own)
        if splits_rows:
            x = jax.lax.all_gather(x, "expert", axis=0, tiled=True)
        first = jax.lax.axis_index("expert") * len(kernels.gate)
        part = _own_part(x, kernels, experts, activation, first, platform)
        part = jax.lax.psum(part, "tensor")
        if splits_rows:
            return jax.lax.psum_scatter(part, "expert", scatter_dimension=0, tiled=True)
        return jax.lax.psum(part, "expert")

    wide, tall = PartitionSpec("expert", None, "tensor"), PartitionSpec("expert", "tensor", None)
    return jax.shard_map(
        of_shard,
        mesh=mesh,
        in_specs=(spec, Kernels(PartitionSpec(None, None), wide, wide, tall)),
        out_specs=spec,
    )(x, kernels)


def _varying(x: Array, axes: set[str]) -> Array:
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def route(
    x: Float[Array, "N D"], router: Float[Array, "D E"], experts: Experts
) -> tuple[Int[Array, "N C"], Float[Array, "N C"]]:
    """The C experts of each token, and the float32 weights of their outputs, as transformers."""
    probabilities = jax.nn.softmax((x @ router).astype(jnp.float32), axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, experts.experts_per_token)
    if experts.normalize_weights:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return chosen, weights


def _own_part(x, kernels, experts, activation, first, platform):
    """`mixture` of this device's experts, from number `first`, on devices of `platform`."""
    tokens = x.reshape(-1, x.shape[-1])
    chosen, weights = route(tokens, kernels.router, experts)
    count, per_token = len(kernels.gate), chosen.shape[1]
    num_rows = len(tokens) * per_token
    # TPUs have an instruction for rows sorted by expert. Elsewhere JAX multiplies all rows with
    # all experts, so each expert's rows fill blocks of their own there.
    block = _block_size(num_rows // count, platform)

    own = chosen.reshape(-1) - first
    own = jnp.where((own >= 0) & (own < count), own, count)  # experts of other devices: last
    sizes = jnp.bincount(own, length=count + 1)
    used = -(-sizes[:count] // block)  # blocks of each expert
    begins = jnp.cumsum(used) - used
    order = jnp.argsort(own)  # stable
    sorted_own = own[order]
    rank = jnp.arange(num_rows) - (jnp.cumsum(sizes) - sizes)[sorted_own]  # among its expert's
    total = (num_rows if block == 1 else num_rows // block * block + count * block) or block
    beyond = jnp.append(begins * block, total)  # the place of other devices' rows is dropped
    sorted_places = jnp.where(sorted_own < count, beyond[sorted_own] + rank, total)
    places = jnp.zeros_like(own).at[order].set(sorted_places, unique_indices=True)

    # [total, D]: each token, once for each of its experts; zeros between.
    repeated = jnp.repeat(tokens, per_token, axis=0)
    rows = jnp.zeros_like(repeated, shape=(total, x.shape[-1]))
    rows = rows.at[places].set(repeated, mode="drop")

    def product(rows, kernel):
        if block == 1:
            return jax.lax.ragged_dot(rows, kernel, sizes[:count])
        owners = jnp.searchsorted(begins + used, jnp.arange(total // block), side="right")
        blocks = rows.reshape(total // block, block, -1)
        found = block_product(blocks, kernel, owners.astype(jnp.int32), jnp.sum(used))
        return found.reshape(total, -1)

    features = activation(product(rows, kernels.gate)) * product(rows, kernels.up)
    outputs = product(features, kernels.down)
    by_token = outputs.at[places].get(mode="fill", fill_value=0).reshape(*chosen.shape, -1)
    mixed = jnp.einsum(
        "ncd,nc->nd", by_token, weights.astype(x.dtype), preferred_element_type=jnp.float32
    )
    return mixed.astype(x.dtype).reshape(x.shape)


def _block_size(rows_per_expert: int, platform: str) -> int:
    """A power of two, at least a quarter of it: about a quarter more rows. 1 on a TPU."""
    if platform == "tpu":
        return 1
    power = 2 ** math.ceil(math.log2(max(rows_per_expert / 4, 1)))
    return min(max(power, SMALLEST_BLOCK), LARGEST_BLOCK)


@jax.custom_vjp
def block_product(
    blocks: Float[Array, "M R I"],
    kernels: Float[Array, "X I O"],
    owners: Int[Array, " M"],
    num_used: Int[Array, ""],
) -> Float[Array, "M R O"]:
    """Each block of rows times the kernel of its owner, for `num_used` blocks; zeros after.

    The gradient is written by hand: JAX's would hold a gradient of all kernels in each step.
    """

    def step(index, found):
        return found.at[index].set(blocks[index] @ kernels[owners[index]])

    found = jnp.zeros_like(blocks, shape=(*blocks.shape[:2], kernels.shape[2]))
    return jax.lax.fori_loop(0, num_used, step, found)


def _block_gradients(kept, gradient):
    blocks, kernels, owners, num_used = kept

    def step(index, found):
        of_blocks, of_kernels = found
        owner = owners[index]
        added = jnp.matmul(
            blocks[index].T, gradient[index], preferred_element_type=jnp.float32
        )  # float32: an expert may have many blocks
        return (
            of_blocks.at[index].set(gradient[index] @ kernels[owner].T),
            of_kernels.at[owner].add(added),
        )

    start = jnp.zeros_like(blocks), jnp.zeros_like(kernels, jnp.float32)
    of_blocks, of_kernels = jax.lax.fori_loop(0, num_used, step, start)
    return of_blocks, of_kernels.astype(kernels.dtype), None, None


block_product.defvjp(lambda *arguments: (block_product(*arguments), arguments), _block_gradients)
