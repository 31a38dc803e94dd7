"""Fused attention kernels of JAX behind `self_attention`, and which one a program uses.

- "splash": the Pallas kernel for TPUs, jax.experimental.pallas.ops.tpu.splash_attention.
- "triton": the Pallas kernel for GPUs, jax.experimental.pallas.ops.gpu.attention.

Both keep the scores of one block on the chip, forward and backward, so their memory is linear in
the number of columns. They count a window in columns, and `self_attention` in positions. Inside a
segment both differ by a constant, because its tokens are in consecutive columns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from semrl_jax.models.decoder_config import DecoderConfig
from semrl_jax.models.sharding import activation_spec, shared_heads
from semrl_jax.support.errors import UserError

PLATFORMS = {"splash": ("tpu",), "triton": ("gpu", "cuda")}
# The widest heads that the kernels were compiled with, for a v5e and as a program for CUDA.
WIDEST_HEAD = {"splash": 256, "triton": 128}
SMALLEST_BLOCK = 128  # columns; both kernels take whole blocks
LARGEST_BLOCK = 512

# From queries, keys, values and segment ids of one device to attended values [B, S, N, H].
_Local = Callable[..., Float[Array, "B S N H"]]


def choose_kernel(wanted: str, config: DecoderConfig, mesh: Mesh | None, platform: str) -> str:
    """The kernel of a model's programs: "xla", "splash" or "triton".

    "auto" takes splash on TPUs if it supports the model and the mesh, and XLA everywhere else. It
    does not take triton, which computes a shared prompt once per response. docs/memory.md has the
    times of both on a GPU. Raises UserError if `wanted` names a kernel that the platform, the model
    or the mesh does not fit.
    """
    if wanted == "xla":
        return "xla"
    name = "splash" if wanted == "auto" else wanted
    reason = _unsupported(name, config, mesh, platform)
    if reason is None:
        return name
    if wanted == "auto":
        return "xla"
    raise UserError(f"model.attention={wanted!r} {reason}; choose auto or xla.")


def _unsupported(name: str, config: DecoderConfig, mesh: Mesh | None, platform: str) -> str | None:
    """Why a kernel cannot be used; None if it can."""
    if platform not in PLATFORMS[name]:
        return f"needs a {PLATFORMS[name][0].upper()}, and the program runs on a {platform.upper()}"
    if config.head_dim > WIDEST_HEAD[name]:
        return (
            f"takes heads of at most {WIDEST_HEAD[name]} values, and the model has "
            f"head_dim={config.head_dim}"
        )
    if name == "triton" and config.sliding_window is not None:
        return f"has no windows, and the model has sliding_window={config.sliding_window}"
    if cap := config.attention_logit_softcap:
        return f"has no cap of scores, and the model has attention_logit_softcap={cap:g}"
    if mesh is not None and mesh.shape["sequence"] > 1:
        return f"needs whole rows, and mesh.sequence={mesh.shape['sequence']} splits them"
    return None


def kernel_attention(
    kernel: str,
    segment_ids: Int[Array, "B S"],
    *,
    mesh: Mesh | None,
    windows: tuple[int | None, ...],
    interpret: bool,
) -> Callable[..., Float[Array, "B S N H"]]:
    """`self_attention` by a kernel.

    Padding attends to padding here. Its values are as meaningless as there, and finite.

    Args:
      segment_ids: int32; the tokens of a segment are in consecutive columns.
      windows: of the layers, each one once; None is a layer without a window. The kernel compiles
        one program for each.
      interpret: runs the kernel as a JAX program, on any device.
    """
    local = {"splash": _splash, "triton": _triton}[kernel]

    def attend(query, key, value, window):
        key, value = (shared_heads(x, query.shape[2], mesh) for x in (key, value))
        programs = [
            _on_each_device(
                functools.partial(local, window=each, interpret=interpret), query.shape, mesh
            )
            for each in windows
        ]
        arrays = query, key, value, segment_ids
        if len(programs) == 1:
            return programs[0](*arrays)
        # The window of a layer is scanned, but the kernel's grid needs it at compile time.
        sizes = jnp.array([_size(each) for each in windows])
        return jax.lax.switch(jnp.argmax(sizes == window), programs, *arrays)

    return attend


def _size(window: int | None) -> int:
    return jnp.iinfo(jnp.int32).max if window is None else window


def _on_each_device(local: _Local, shape: tuple[int, ...], mesh: Mesh | None) -> _Local:
    """`local` on a device's own rows and heads: the compiler cannot split a kernel by itself."""
    if mesh is None:
        return local
    heads = activation_spec("heads", shape, mesh)
    tokens = activation_spec("tokens", shape[:2], mesh)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(heads, heads, heads, tokens),
        out_specs=heads,
        check_vma=False,  # Pallas does not say over which axes a kernel's result varies
    )


def _whole_blocks(attend: _Local) -> _Local:
    """Pads the columns to whole blocks, as a segment of padding."""

    @functools.wraps(attend)
    def padded(query, key, value, segment_ids, **options):
        length = query.shape[1]
        # Longer blocks are faster. Limiting them by the length bounds the padding to a quarter.
        size = min(max(_power_of_two(length // 4), SMALLEST_BLOCK), LARGEST_BLOCK)
        columns = ((0, 0), (0, -length % size))
        arrays = (jnp.pad(x, (*columns, (0, 0), (0, 0))) for x in (query, key, value))
        segments = jnp.pad(segment_ids, columns)
        return attend(*arrays, segments, block=size, **options)[:, :length]

    return padded


def _power_of_two(number: int) -> int:
    """The largest power of two that is at most `number`, at least 1."""
    return 1 << max(number, 1).bit_length() - 1


@_whole_blocks
def _splash(
    query: Float[Array, "B S N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    segment_ids: Int[Array, "B S"],
    *,
    block: int,
    window: int | None,
    interpret: bool,
) -> Float[Array, "B S N H"]:
    """Blocks that no query sees, because of causality or the window, are not computed."""
    # Importing Pallas takes 0.4 s, and most processes use no kernel.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    _, length, num_heads, width = query.shape
    shape = (length, length)
    mask = masks.CausalMask(shape)
    if window is not None:
        mask = masks.LocalMask(shape, (window - 1, 0), 0)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * num_heads),
        block_sizes=splash.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=block,
            block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
            block_q_dq=block, block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )  # fmt: skip

    def of_row(query, key, value, segments):
        return kernel(query, key, value, segment_ids=splash.SegmentIds(segments, segments))

    heads = (x.swapaxes(1, 2) for x in (query * width**-0.5, key, value))  # the kernel has no scale
    return jax.vmap(of_row)(*heads, segment_ids).swapaxes(1, 2)


@_whole_blocks
def _triton(
    query: Float[Array, "B S N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    segment_ids: Int[Array, "B S"],
    *,
    block: int,
    window: int | None,
    interpret: bool,
) -> Float[Array, "B S N H"]:
    """The kernel has as many key heads as query heads. Its own blocks divide `block`."""
    from jax.experimental.pallas.ops.gpu import attention as triton

    del block, window
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    width = query.shape[-1]
    # Two blocks of 128 such heads exceed the shared memory of an H100 or H200.
    size = 64 if query.dtype == jnp.float32 and width > 64 else 128
    blocks = dataclasses.replace(triton.BlockSizes.get_default(), block_q=size, block_k=size)
    options = {"causal": True, "block_sizes": blocks, "interpret": interpret}
    return triton.mha(query, key, value, segment_ids, width**-0.5, **options)
