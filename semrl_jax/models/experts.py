"""Mixtures of experts: the router, and a dispatch that drops no token.

The tokens of each expert are put next to each other, and each expert's kernels are multiplied with
its own rows only. On a mesh, the axis `expert` splits the experts. Its devices gather each other's
tokens, compute their own experts' part of every token, and sum the parts where the tokens came
from.

Router replay: the choice of experts may be given, such as the one that an engine made. The router
still computes their weights, so that it learns.

Source: arXiv:2211.15841 for the blocks of rows, each of one expert; arXiv:2510.11370
(R3) for the replay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Integer

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
    given: Integer[Array, "B S C"] | None = None,
    platform: str | None = None,
) -> tuple[Float[Array, "B S D"], Int[Array, "B S C"]]:
    """The weighted sum of the outputs of each token's experts, and the experts; see `route`.

    Padding is routed as well. `platform`: as in `self_attention`.
    """
    platform = platform or platform_of(mesh)
    if mesh is None:
        tokens = x.reshape(-1, x.shape[-1])
        asked = None if given is None else given.reshape(len(tokens), -1)
        chosen, weights = route(tokens, kernels.router, experts, asked)
        found = _own_part(tokens, chosen, weights, kernels, activation, 0, platform)
        return found.reshape(x.shape), chosen.reshape(*x.shape[:-1], -1)
    spec = activation_spec("states", x.shape, mesh)
    # Few rows are not split over the data axes: then every device has them.
    splits_rows = spec[0] is not None
    of_x = {name for axes in spec for name in axis_names(axes)}

    def routed(x, router, *given):
        tokens, *given = (each.reshape(-1, each.shape[-1]) for each in (x, *given))
        found = route(tokens, router, experts, *given)
        return tuple(each.reshape(*x.shape[:-1], -1) for each in found)

    def of_shard(x, chosen, weights, kernels):
        # The gradients of `block_product` vary over the same axes as what they are of.
        tokens = [_varying(each, {"expert", "tensor"} - of_x) for each in (x, chosen, weights)]
        own = (_varying(kernel, of_x - {"expert"}) for kernel in kernels[1:])
        kernels = Kernels(kernels.router, *own)
        if splits_rows:
            tokens = jax.lax.all_gather(tokens, "expert", axis=0, tiled=True)
        first = jax.lax.axis_index("expert") * len(kernels.gate)
        rows = (each.reshape(-1, each.shape[-1]) for each in tokens)
        part = _own_part(*rows, kernels, activation, first, platform).reshape(tokens[0].shape)
        part = jax.lax.psum(part, "tensor")
        if splits_rows:
            return jax.lax.psum_scatter(part, "expert", scatter_dimension=0, tiled=True)
        return jax.lax.psum(part, "expert")

    whole = PartitionSpec(None, None)
    wide, tall = PartitionSpec("expert", None, "tensor"), PartitionSpec("expert", "tensor", None)
    arrays = (x, kernels.router) if given is None else (x, kernels.router, given)
    in_specs = (spec, whole, spec)[: len(arrays)]
    routing = jax.shard_map(routed, mesh=mesh, in_specs=in_specs, out_specs=spec)(*arrays)
    mixed = jax.shard_map(
        of_shard,
        mesh=mesh,
        in_specs=(spec, spec, spec, Kernels(whole, wide, wide, tall)),
        out_specs=spec,
    )(x, *routing, kernels)
    return mixed, routing[0]


def _varying(x: Array, axes: set[str]) -> Array:
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def route(
    x: Float[Array, "N D"],
    router: Float[Array, "D E"],
    experts: Experts,
    given: Integer[Array, "N C"] | None = None,
) -> tuple[Int[Array, "N C"], Float[Array, "N C"]]:
    """The C experts of each token, and the float32 weights of their outputs, as transformers.

    The router chooses the experts with the highest probabilities, unless others are `given`. A
    number of E or more is no expert: for such a token, the router chooses.
    """
    probabilities = jax.nn.softmax((x @ router).astype(jnp.float32), axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, experts.experts_per_token)
    if given is not None:
        is_known = jnp.all(given < experts.num_experts, axis=-1, keepdims=True)
        chosen = jnp.where(is_known, given.astype(chosen.dtype), chosen)
        weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
    if experts.normalize_weights:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return chosen, weights


def _own_part(tokens, chosen, weights, kernels, activation, first, platform):
    """`mixture` of this device's experts, from number `first`, on devices of `platform`."""
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
    rows = jnp.zeros_like(repeated, shape=(total, tokens.shape[-1]))
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
        "ncd,nc->nd", by_token, weights.astype(tokens.dtype), preferred_element_type=jnp.float32
    )
    return mixed.astype(tokens.dtype)


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
