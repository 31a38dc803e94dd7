"""A decoder in Flax NNX: grouped-query attention, rotary positions, layers under one scan.

`Decoder` is the mathematics. Other rooms call `Policy` (policy.py), which takes plain nested dicts
of arrays. Every method returns the state after the final norm, the input of the output matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Integer

from semrl_jax.models.attention import (
    Attention,
    Columns,
    attend_to_cache,
    self_attention,
    within_window,
)
from semrl_jax.models.decoder_config import DecoderConfig, Experts, RopeScaling
from semrl_jax.models.experts import Kernels, mixture
from semrl_jax.models.lora import A, AdaptedLinear, B, Dropout
from semrl_jax.models.sharding import (
    constrain,
    gather_kernel,
    gather_over_fsdp,
    kernel_gradient,
    partition_spec,
    platform_of,
    splits_rows,
)

FEW_ROWS = 48  # of a product: up to this number, see benchmarks/small_products.py
NO_WINDOW = jnp.iinfo(jnp.int32).max  # in the place of a window
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class KVCache(NamedTuple):
    """Keys and values of each layer; `positions[b, c]` is -1 where column c of row b is empty.

    One array per layer, because a token's column is then written in place. The columns are the last
    axis of the keys, so that the sum over a head's width runs over whole vectors of columns.
    """

    keys: tuple[Float[Array, "B K H S"], ...]
    values: tuple[Float[Array, "B K S H"], ...]
    positions: Int[Array, "B S"]


class Decoded(NamedTuple):
    """What a pass of an engine over T columns gives."""

    final_states: Float[Array, "B D"]  # of the last column
    layer_inputs: Float[Array, "B L D"]  # of each layer, in the last column
    cache: KVCache
    # The experts of each token, in the M layers that have experts; without any, M and C are 0.
    experts: Int[Array, "B T M C"]
    states: Float[Array, "B T K D"] | None = None  # in the layers that a prefill was asked for


def rotary_frequencies(
    config: DecoderConfig, window: Int[Array, ""] | None = None
) -> Float[Array, " F"]:
    """Angle of each of the H/2 pairs from one position to the next; float32 radians.

    theta^(-2i/H), changed as `RopeScaling` describes; the blend of Llama 3 is linear. A layer with
    a window may have a base of its own, which is not scaled.

    Source: transformers 5, modeling_rope_utils.py, `_compute_llama3_parameters`.
    """
    half = config.head_dim // 2
    exponents = -jnp.arange(half, dtype=jnp.float32) / half
    frequencies = _scaled(config.rope_theta**exponents, config.rope_scaling)
    if window is None or config.local_rope_theta is None:
        return frequencies
    return jnp.where(window == NO_WINDOW, frequencies, config.local_rope_theta**exponents)


def _scaled(frequencies: Float[Array, " F"], scaling: RopeScaling | None) -> Float[Array, " F"]:
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_position_embeddings * frequencies / (2 * jnp.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def rotary(
    x: Float[Array, "B T N H"], positions: Int[Array, "B T"], frequencies: Float[Array, " F"]
) -> Float[Array, "B T N H"]:
    """Rotates the pairs (i, i + H/2) by position * frequency; computed in float32."""
    angles = positions[:, :, None].astype(jnp.float32) * frequencies[None, None, :]  # [B, T, H/2]
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class OffsetRMSNorm(nnx.Module):
    """x / rms(x) * (1 + scale), in float32 and then cast, as in Gemma."""

    def __init__(self, width: int, *, epsilon: float, dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.epsilon = epsilon
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*axes D"]) -> Float[Array, "*axes D"]:
        x = x.astype(jnp.float32)
        mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
        scale = 1.0 + self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (x * jax.lax.rsqrt(mean_square + self.epsilon) * scale).astype(self.dtype)


def _norm(
    config: DecoderConfig, width: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
) -> nnx.RMSNorm | OffsetRMSNorm:
    if config.declared.offset_norms:
        return OffsetRMSNorm(width, epsilon=config.rms_norm_eps, dtype=dtype)
    return nnx.RMSNorm(
        width, epsilon=config.rms_norm_eps, dtype=dtype, param_dtype=jnp.float32, rngs=rngs
    )


class _Layout(NamedTuple):
    """Where a kernel [in, out] lies: static."""

    mesh: Mesh
    spec: PartitionSpec


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(
    x: Float[Array, "B T I"], kernel: Float[Array, "I O"], layout: _Layout | None
) -> Float[Array, "B T O"]:
    """x @ kernel, which a mesh gathers for the product, and again in the backward pass.

    The gradient is written by hand. Automatic differentiation would transpose the gradient of the
    kernel. A CPU would then write a transposed copy of a factor: as costly as the product.
    """
    return x @ _gathered(kernel, layout)


def _gathered(kernel, layout):
    return kernel if layout is None else gather_kernel(kernel, layout.spec, layout.mesh)


def _product_gradients(layout, kept, gradient):
    x, kernel = kept
    if layout is not None and splits_rows(x, layout.mesh):
        of_kernel = kernel_gradient(x, gradient, layout.spec, layout.mesh)
    else:
        of_kernel = jax.lax.dot_general(x, gradient, (((0, 1), (0, 1)), ((), ())))
    return gradient @ _gathered(kernel, layout).T, of_kernel


# Not `_product` itself: rematerialisation must see the product to keep its result.
_product.defvjp(
    lambda x, kernel, layout: (x @ _gathered(kernel, layout), (x, kernel)), _product_gradients
)


def _dot_general(layout, x, kernel, *_, **__):
    """What nnx.Linear calls, for the only case that a layer has."""
    return _product(x, kernel, layout)


def _product_of_few(x: Float[Array, "B T I"], kernel: Float[Array, "I O"], *_, **__):
    """x @ kernel for few rows on a CPU, with a kernel that lies in memory as [O, I].

    XLA's product copies its right factor into blocks. If that is the kernel, the copy takes longer
    than the product. The barriers keep the compiler from exchanging the factors.
    """
    rows = jax.lax.optimization_barrier(x.reshape(-1, x.shape[-1]).T)
    product = jax.lax.optimization_barrier(kernel.T @ rows).T
    return product.reshape(*x.shape[:-1], -1)


@jax.custom_vjp
def _looked_up(table: Float[Array, "V D"], token_ids: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """Rows of a table. The gradient sums in float32: in bfloat16, 256 + 1 is 256."""
    return jnp.take(table, token_ids, axis=0)


def _sums_of_rows(kept, gradient):
    table, token_ids = kept
    sums = jnp.zeros_like(table, jnp.float32).at[token_ids].add(gradient.astype(jnp.float32))
    return sums.astype(table.dtype), None


_looked_up.defvjp(
    lambda table, token_ids: (_looked_up(table, token_ids), (table, token_ids)), _sums_of_rows
)


class ExpertKernels(nnx.Module):
    """A product of each expert."""

    def __init__(self, experts: Experts, num_in: int, num_out: int, rngs: nnx.Rngs):
        initial = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=0)
        shape = (experts.num_experts, num_in, num_out)
        self.kernel = nnx.Param(initial(rngs.params(), shape, jnp.float32))


class DecoderLayer(nnx.Module):
    """Norm, attention, norm, gated feed-forward. The caller computes the attention itself."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: jnp.dtype,
        mesh: Mesh | None,
        rngs: nnx.Rngs,
        platform: str | None = None,
    ):
        self.config = config
        self.mesh = mesh
        self.platform = platform
        hidden, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads

        def linear(name, num_in, num_out, bias=False):
            def product(leaf):
                if mesh is None or mesh.size == 1:
                    return functools.partial(_dot_general, None)
                spec = PartitionSpec(*partition_spec(f"layers/{name}/{leaf}")[1:])
                return functools.partial(_dot_general, _Layout(mesh, spec))

            # Scaled by 1/sqrt(fan-in): states keep their size in a random model of any width.
            return AdaptedLinear(
                num_in, num_out, use_bias=bias, dtype=dtype, param_dtype=jnp.float32,
                kernel_init=nnx.initializers.variance_scaling(1.0, "fan_in", "normal"),
                dot_general=product("kernel"), module=name, of_a=product(A), of_b=product(B),
                rngs=rngs,
            )  # fmt: skip

        has_bias = config.declared.attention_bias
        norm = functools.partial(_norm, config, dtype=dtype, rngs=rngs)
        self.attention_norm = norm(hidden)
        self.query = linear("query", hidden, heads * config.head_dim, has_bias)
        self.key = linear("key", hidden, kv_heads * config.head_dim, has_bias)
        self.value = linear("value", hidden, kv_heads * config.head_dim, has_bias)
        self.output = linear("output", heads * config.head_dim, hidden)
        if config.declared.query_key_norm:
            self.query_norm = norm(config.head_dim)
            self.key_norm = norm(config.head_dim)
        if config.declared.post_norms:
            self.attention_post_norm = norm(hidden)
            self.mlp_post_norm = norm(hidden)
        self.mlp_norm = norm(hidden)
        self.is_dense = config.experts is None
        if config.experts is None or config.experts.dense_layers:
            self.gate = linear("gate", hidden, config.intermediate_size)
            self.up = linear("up", hidden, config.intermediate_size)
            self.down = linear("down", config.intermediate_size, hidden)
        if experts := config.experts:
            self.router = linear("router", hidden, experts.num_experts)
            self.expert_gate = ExpertKernels(experts, hidden, experts.intermediate_size, rngs)
            self.expert_up = ExpertKernels(experts, hidden, experts.intermediate_size, rngs)
            self.expert_down = ExpertKernels(experts, experts.intermediate_size, hidden, rngs)

    def heads(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        window: Int[Array, ""] | None,
        dropout: Dropout | None = None,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Queries, keys and values of normed inputs, positions applied."""
        normed = self.attention_norm(x)

        def of(linear, num_heads):
            heads = linear(normed, dropout).reshape(*x.shape[:2], num_heads, -1)
            return constrain(heads, "heads", self.mesh)

        query = of(self.query, self.config.num_heads)
        key = of(self.key, self.config.num_kv_heads)
        value = of(self.value, self.config.num_kv_heads)
        if self.config.declared.query_key_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        if (scalar := self.config.query_pre_attn_scalar) not in (None, self.config.head_dim):
            query = query * (self.config.head_dim / scalar) ** 0.5  # attention divides by its own
        frequencies = rotary_frequencies(self.config, window)
        return rotary(query, positions, frequencies), rotary(key, positions, frequencies), value

    def residual(
        self,
        x: Float[Array, "B T D"],
        attended: Float[Array, "B T N H"],
        dropout: Dropout | None = None,
        experts: Integer[Array, "B T C"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Int[Array, "B T C"] | None]:
        """Adds the attention output, then the feed-forward output.

        Also returns the experts that tokens went to: the given ones, see `experts.route`.
        """
        attended = constrain(attended, "heads", self.mesh).reshape(*x.shape[:2], -1)
        post_norms = self.config.declared.post_norms
        attended = constrain(self.output(attended, dropout), "states", self.mesh)
        x = x + (self.attention_post_norm(attended) if post_norms else attended)
        added, chosen = self._feed_forward(self.mlp_norm(x), dropout, experts)
        return x + (self.mlp_post_norm(added) if post_norms else added), chosen

    def _feed_forward(
        self,
        normed: Float[Array, "B T D"],
        dropout: Dropout | None,
        given: Integer[Array, "B T C"] | None,
    ) -> tuple[Float[Array, "B T D"], Int[Array, "B T C"] | None]:
        activation = ACTIVATIONS[self.config.declared.activation]
        if not self.is_dense:

            def kernel(name):
                own = getattr(self, name).kernel[...].astype(normed.dtype)
                return gather_over_fsdp(own, name, self.mesh)

            kernels = Kernels(*map(kernel, ("router", "expert_gate", "expert_up", "expert_down")))
            options = self.config.experts, activation, self.mesh, given, self.platform
            found = mixture(normed, kernels, *options)
            return constrain(found[0], "states", self.mesh), found[1]
        features = activation(self.gate(normed, dropout)) * self.up(normed, dropout)
        features = constrain(features, "features", self.mesh)
        return constrain(self.down(features, dropout), "states", self.mesh), None


class _OfLayer(NamedTuple):
    """What a layer gets with its parameters; None where it needs none."""

    window: Int[Array, ""] | None
    number: Int[Array, ""] | None  # of the layer, for dropout
    experts: Integer[Array, "B S C"] | None  # that are given


class Decoder(nnx.Module):
    """Embedding, L layers with stacked parameters [L, ...], final norm, output matrix."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: jnp.dtype,
        remat: str,
        mesh: Mesh | None,
        rngs: nnx.Rngs,
        kernel: str = "xla",
        platform: str | None = None,
    ):
        self.config = config
        self.remat = remat
        self.kernel = kernel
        self.platform = platform
        self.mesh = mesh
        self.dtype = dtype
        self.embed = nnx.Embed(
            config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=jnp.float32,
            embedding_init=nnx.initializers.normal(config.hidden_size**-0.5), rngs=rngs,
        )  # fmt: skip

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked_layers(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, dtype=dtype, mesh=mesh, rngs=rngs, platform=platform)

        self.layers = stacked_layers(rngs)
        if self._mixes_kinds:  # a layer has one kind of feed-forward
            graph, state = nnx.split(self.layers)
            self.layers = nnx.merge(graph, _of_layers_with_it(state, config))
        self.final_norm = _norm(config, config.hidden_size, dtype=dtype, rngs=rngs)
        if not config.tie_embeddings:
            self.head = nnx.Linear(
                config.hidden_size, config.vocab_size, use_bias=False, dtype=dtype,
                param_dtype=jnp.float32, rngs=rngs,
            )  # fmt: skip

    def __call__(
        self,
        token_ids: Int[Array, "B S"],
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"],
        dropout: Dropout | None = None,
        experts: Integer[Array, "B S M C"] | None = None,
    ) -> Float[Array, "B S D"]:
        """States after the final norm of whole sequences, in the compute dtype.

        Args:
          token_ids: int32; any id at padding, whose states are finite and meaningless.
          positions: int32, from 0 at the first token of a segment.
          segment_ids: int32; a token attends to itself and to earlier tokens of its own segment
            that are inside the layer's window; 0 is padding.
          dropout: of the inputs of adapters, in all layers; None: there is none.
          experts: of each token in the M layers that have experts, see `experts.route`; None: the
            routers choose.
        """
        num_columns = token_ids.shape[1]
        if self.mesh is not None:  # an equal number of columns per device
            padding = ((0, 0), (0, -num_columns % self.mesh.shape["sequence"]))
            (token_ids, positions, segment_ids), of_tokens = jax.tree.map(
                lambda x: constrain(jnp.pad(x, padding), "tokens", self.mesh),
                ((token_ids, positions, segment_ids), dropout and dropout[1:3]),
            )
            dropout = dropout and Dropout(dropout.rate, *of_tokens)
            if experts is not None:  # the added columns have expert 0, and no one reads them
                experts = jnp.pad(experts, (*padding, (0, 0), (0, 0)))
        attend = self._attention(positions, segment_ids)

        def step(x, layer, given):
            own = dropout and dropout._replace(layer=given.number)
            query, key, value = layer.heads(x, positions, given.window, own)
            attended = attend(query, key, value, given.window)
            return layer.residual(x, attended, own, given.experts)[0]

        numbers = dropout and jnp.arange(self.config.num_layers)
        x = self._scan(step, self._embedded(token_ids), numbers, experts)
        return self.final_norm(x)[:, :num_columns]

    def prefill(
        self,
        token_ids: Int[Array, "B P"],
        positions: Int[Array, "B P"],
        segment_ids: Int[Array, "B P"],
        layers: tuple[int, ...] = (),
    ) -> Decoded:
        """Runs left-padded prompts; the last column is every row's last prompt token.

        `states` are those in `layers`, K Hugging Face indices.
        """
        attend = self._attention(positions, segment_ids)
        x = self._embedded(token_ids)
        inputs, keys, values, experts = [], [], [], []
        for layer, window in self._unrolled():
            inputs.append(x)
            query, key, value = layer.heads(x, positions, window)
            keys.append(constrain(key.transpose(0, 2, 3, 1), "cache", self.mesh))
            values.append(constrain(value.swapaxes(1, 2), "cache", self.mesh))
            x, chosen = layer.residual(x, attend(query, key, value, window))
            experts.append(chosen)
        final = self.final_norm(x)
        by_layer = dict(enumerate([*inputs, final])) | {-1: final}
        no_states = jnp.zeros((*x.shape[:2], 0, x.shape[2]), x.dtype)
        wanted = jnp.stack([by_layer[i] for i in layers], axis=2) if layers else no_states
        cache = KVCache(tuple(keys), tuple(values), jnp.where(segment_ids != 0, positions, -1))
        last = jnp.stack([x[:, -1] for x in inputs], axis=1)
        return Decoded(final[:, -1], last, cache, _stacked_experts(experts, token_ids), wanted)

    def decode(
        self,
        token_ids: Int[Array, " B"],
        positions: Int[Array, " B"],
        column: Int[Array, ""],
        cache: KVCache,
        prompts: KVCache | None = None,
    ) -> Decoded:
        """Runs one token per row at `positions[b]`; see `extend`."""
        return self.extend(token_ids[:, None], positions[:, None], column, cache, prompts)

    def extend(
        self,
        token_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        column: Int[Array, ""],
        cache: KVCache,
        prompts: KVCache | None = None,
    ) -> Decoded:
        """Runs T tokens per row, written from `column` of the cache on.

        Columns may be in any order: the positions in the cache decide what a token attends to.

        Args:
          positions: int32; -1 is padding, which no token attends to. The last column has none.
          prompts: further columns that tokens attend to, in R rows. B / R neighbouring rows of
            tokens attend to the same one.
        """

        def put(array, new, axis):
            return jax.lax.dynamic_update_slice_in_dim(array, new, column, axis)

        def cached(array, new, axis):
            # The new column takes the layout of the cache. Else the compiler may split a cache that
            # every device has, and gather all of it after each token.
            column = constrain(new, "cache", self.mesh)
            return constrain(put(array, column, axis), "cache", self.mesh)

        key_positions = put(cache.positions, positions, 1)
        if prompts is not None:
            group = len(token_ids) // len(prompts.positions)
            prompt_positions = jnp.repeat(prompts.positions, group, axis=0)

        def seen(key_positions, window):
            mask = (key_positions >= 0)[:, None, :]
            if token_ids.shape[1] > 1:  # else there is no later token
                mask = mask & (key_positions[:, None, :] <= positions[:, :, None])
            return within_window(mask, positions, key_positions, window)

        x = self._embedded(token_ids)
        inputs, keys, values, experts = [], [], [], []
        is_one_cpu = self.mesh is None or self.mesh.size == 1
        is_one_cpu &= (self.platform or platform_of(self.mesh)) == "cpu"
        for index, (layer, window) in enumerate(self._unrolled()):
            if is_one_cpu and 1 < token_ids.size <= FEW_ROWS:
                layer.set_attributes(dot_general=_product_of_few)
            inputs.append(x[:, -1])
            query, key, value = layer.heads(x, positions, window)
            keys.append(cached(cache.keys[index], key.transpose(0, 2, 3, 1), 3))
            values.append(cached(cache.values[index], value.swapaxes(1, 2), 2))
            parts = [Columns(keys[-1], values[-1], seen(key_positions, window))]
            if prompts is not None:
                own = prompts.keys[index], prompts.values[index]
                parts.insert(0, Columns(*own, seen(prompt_positions, window)))
            x, chosen = layer.residual(x, self._attended(query, parts))
            experts.append(chosen)
        new_cache = KVCache(tuple(keys), tuple(values), key_positions)
        chosen = _stacked_experts(experts, token_ids)
        return Decoded(self.final_norm(x)[:, -1], jnp.stack(inputs, axis=1), new_cache, chosen)

    def output_weights(self) -> tuple[Float[Array, "_ _"], int]:
        """The output matrix in the compute dtype, and its axis of the vocabulary: 0 if tied."""
        if self.config.tie_embeddings:
            return self.embed.embedding[...].astype(self.dtype), 0
        return self.head.kernel[...].astype(self.dtype), 1

    @property
    def _mixes_kinds(self) -> bool:
        """Whether some layers are dense and others have experts; these do not share a scan."""
        return self.config.experts is not None and bool(self.config.experts.dense_layers)

    @property
    def _windows(self) -> Int[Array, " L"] | None:
        """The window of each layer, scanned with its parameters; None: no layer has a window."""
        config = self.config
        if config.sliding_window is None:
            return None
        full = np.isin(np.arange(config.num_layers), config.full_attention_layers)
        return jnp.where(full, NO_WINDOW, jnp.int32(config.sliding_window))

    def _attention(self, positions: Int[Array, "B S"], segment_ids: Int[Array, "B S"]) -> Attention:
        """The attention of every layer; a layer passes its own of `_windows`."""
        window = self.config.sliding_window
        mixed = window is not None and self.config.full_attention_layers
        return self_attention(
            positions,
            segment_ids,
            mesh=self.mesh,
            kernel=self.kernel,
            windows=(None, window) if mixed else (window,),
            platform=self.platform,
            softcap=self.config.attention_logit_softcap,
        )

    def _attended(
        self, query: Float[Array, "B T N H"], parts: list[Columns]
    ) -> Float[Array, "B T N H"]:
        softcap = self.config.attention_logit_softcap
        return attend_to_cache(query, parts, self.mesh, self.platform, softcap)

    def _embedded(self, token_ids: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """The input of the first layer."""
        token_ids = constrain(token_ids, "looked_up_tokens", self.mesh)
        x = _looked_up(self.embed.embedding[...], token_ids).astype(self.dtype)
        x = constrain(x, "looked_up", self.mesh)
        if self.config.declared.scaled_embedding:
            x = x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)  # rounded as transformers'
        return constrain(x, "states", self.mesh)

    def _scan(
        self,
        step: Callable,
        x: Float[Array, "B S D"],
        numbers: Int[Array, " L"] | None,
        experts: Integer[Array, "B S M C"] | None,
    ) -> Float[Array, "B S D"]:
        """Carries `step(x, layer, of_layer)` through the layers; one kind is one scan."""
        if experts is not None:
            experts = jnp.moveaxis(experts, 2, 0)

        def layer_step(graph):
            def of_layer(x, scanned):
                state, given = scanned
                return step(x, nnx.merge(graph, state), given), None

            return self._checkpointed(of_layer)

        if not self._mixes_kinds:
            graph, stacked = nnx.split(self.layers)
            given = _OfLayer(self._windows, numbers, experts)
            return jax.lax.scan(layer_step(graph), x, (stacked, given))[0]
        for index, (layer, window) in enumerate(self._unrolled()):
            graph, state = nnx.split(layer)
            number = None if numbers is None else numbers[index]
            place = self.config.place("router", index)
            own = None if experts is None or place is None else experts[place]
            x, _ = layer_step(graph)(x, (state, _OfLayer(window, number, own)))
        return x

    def _unrolled(self) -> Iterator[tuple[DecoderLayer, Int[Array, ""] | None]]:
        """Each layer and its window; a scan would copy the weights of a layer before their use."""
        graph, stacked = nnx.split(self.layers)
        windows = self._windows
        for index in range(self.config.num_layers):
            state = jax.tree_util.tree_map_with_path(
                # A module that the layer does not have takes the place of any other layer's.
                lambda path, leaf, i=index: leaf[self.config.place(path[0].key, i) or 0],
                stacked,
            )
            layer = nnx.merge(graph, state)
            layer.is_dense = self.config.place("router", index) is None
            yield layer, None if windows is None else windows[index]

    def _checkpointed(self, layer_step):
        """Trades memory for recomputation in the backward pass, by option."""
        gathers_experts = self.config.experts is not None and self.mesh is not None
        if self.remat == "none" and not gathers_experts:
            return layer_step
        policies = {
            "none": _all_but_constraints,  # the backward pass gathers the experts again
            "full": None,
            "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        }
        return jax.checkpoint(layer_step, policy=policies[self.remat], prevent_cse=False)


def _stacked_experts(
    chosen: list[Int[Array, "B T C"] | None], token_ids: Int[Array, "B T"]
) -> Int[Array, "B T M C"]:
    found = [each for each in chosen if each is not None]
    return jnp.stack(found, axis=2) if found else jnp.zeros((*token_ids.shape, 0, 0), jnp.int32)


def _of_layers_with_it(state: Any, config: DecoderConfig) -> Any:
    """Stacked parameters without those of layers that do not have the module."""

    def of(path, leaf):
        places = [config.place(path[0].key, layer) for layer in range(config.num_layers)]
        return leaf[np.array([place is not None for place in places])]

    return jax.tree_util.tree_map_with_path(of, state)


def _all_but_constraints(primitive, *_, **__) -> bool:
    """A checkpoint policy: keeps all values except those that only change a layout."""
    return primitive.name != "sharding_constraint"
