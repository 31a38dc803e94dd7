"""A decoder's pass in parts, each of which can be computed in another way.

`models.Decoder` computes what a config says. Here every quantity that an engine could have wrong is
a field: an array (positions, rotary frequencies, which keys a token sees, epsilon, tensors), or a
choice of the program (dtypes, the pairs of the rotation). A test compares the unchanged parts with
`models.Policy`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from semrl_jax import models
from semrl_jax.models.attention import UNSEEN
from semrl_jax.models.decoder import ACTIVATIONS, NO_WINDOW, rotary_frequencies
from semrl_jax.models.decoder_config import DENSE_MODULES, EXPERT_MODULES, DecoderConfig
from semrl_jax.models.experts import Kernels, mixture, route
from semrl_jax.models.lora import A, B, merged, stored

Params = models.Params
ROWS = 256  # of which the logits are computed at once
ATTENTION = ("query", "key", "value", "output")
AXES = ("input", "output")  # of a kernel
HEAD_AXES = {"query/kernel": 1, "key/kernel": 1, "value/kernel": 1, "output/kernel": 0}
NORMS = (
    "attention_norm", "query_norm", "key_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm",
)  # fmt: skip
ACTIVATION_NAMES = {**ACTIVATIONS, "gelu": functools.partial(jax.nn.gelu, approximate=False),
                    "relu": jax.nn.relu}  # fmt: skip


class How(NamedTuple):
    """Choices of the program of a layer: hashable, static under jit."""

    config: DecoderConfig
    dtype: str = "float32"  # of products and states
    activation: str = "silu"
    offset_norms: bool = False
    post_norms: bool = False
    normed_heads: tuple[str, ...] = ()  # of query and key
    rotated: tuple[str, ...] = ("query", "key")
    norms_rotated: bool = False  # whether heads are rotated before they are normed
    is_dense: bool = True
    pairs: str = "halves"  # rotated together: (i, i + H/2), or "neighbours" (2i, 2i + 1)
    rounds_angles: str = "float32"  # dtype of positions * frequencies
    rounds_table: str = "float32"  # dtype of cosines and sines
    rounds_cache: str = "float32"  # dtype of keys and values
    tiles_heads: bool = False  # whether query head n uses key head n % K, not n // (N / K)
    times: int = 1  # how often the layer is applied
    has_slopes: bool = False  # whether it has derivatives in both modes, which takes longer
    gives_old: bool = False  # whether rows before `event` have the states of `before`


class Layer(NamedTuple):
    """One layer of a computation. A pytree apart from `how`."""

    how: How
    params: Params  # of the layer: {module: {leaf: array}}
    frequencies: Float[Array, " F"]
    positions: Float[Array, "B N"]
    seen: Bool[Array, "B N N"]  # which keys a token attends to
    epsilon: Mapping[str, Float[Array, ""] | float]  # of each of NORMS
    score_scale: Float[Array, ""] | float  # of query-key products, 1 / sqrt(H) included
    # Keys and values of tokens in rows before `event` were computed with these parameters from
    # these inputs, and stay in the cache.
    before: Params | None = None
    before_x: Float[Array, "B N D"] | None = None
    event: Int[Array, " B"] | None = None

    def tensors(self) -> dict[str, Array]:
        """The parameters by `module/leaf`."""
        return {
            f"{module}/{leaf}": value
            for module, leaves in self.params.items()
            for leaf, value in leaves.items()
        }

    def with_tensors(self, tensors: Mapping[str, Array]) -> Layer:
        """The layer with some parameters replaced."""
        params = {module: dict(leaves) for module, leaves in self.params.items()}
        for name, value in tensors.items():
            module, _, leaf = name.partition("/")
            params[module][leaf] = value
        return self._replace(params=params)

    def free(self) -> dict[str, Array]:
        """All that may be fitted, with the values that change nothing.

        These are the tensors, the frequencies, and factors of the heads, inputs, outputs and
        experts of a kernel, as "<tensor> by <axis>".
        """
        tensors, width = self.tensors(), self.how.config.head_dim
        found = {"frequencies": self.frequencies, **tensors}
        for name, tensor in tensors.items():
            if tensor.ndim == 3:
                found[f"{name} by expert"] = jnp.ones(len(tensor))
            if tensor.ndim == 2:
                found |= {f"{name} by {by}": jnp.ones(tensor.shape[i]) for i, by in enumerate(AXES)}
            if (axis := HEAD_AXES.get(name)) is not None:
                found[f"{name} by head"] = jnp.ones(tensor.shape[axis] // width)
        return found

    def with_free(self, values: Mapping[str, Array]) -> Layer:
        """The layer with entries of `free` replaced."""
        tensors = {name: values.get(name, own) for name, own in self.tensors().items()}
        for name, value in values.items():
            tensor, _, by = name.partition(" by ")
            if by == "head":
                value, by = jnp.repeat(value, self.how.config.head_dim), AXES[HEAD_AXES[tensor]]
            if by:
                axis = 0 if by == "expert" else AXES.index(by)
                shape = [-1 if i == axis else 1 for i in range(tensors[tensor].ndim)]
                tensors[tensor] = tensors[tensor] * value.reshape(shape)
        frequencies = values.get("frequencies", self.frequencies)
        return self.with_tensors(tensors)._replace(frequencies=frequencies)

    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        for _ in range(self.how.times):
            x = _apply(self.how, self._replace(how=None), x)
        return x


class Computation(NamedTuple):
    """A whole pass over B rows of N tokens."""

    ids: Int[np.ndarray, "B N"]
    targets: Int[np.ndarray, "B N"]  # the token that follows each one
    layers: tuple[Layer, ...]
    embedding: Float[Array, "V D"]
    embedding_scale: float
    final_scale: Float[Array, " D"]
    final_epsilon: float
    final_offset: bool  # whether the final norm multiplies by 1 + scale
    matrix: Float[Array, "V D"]  # the output matrix
    softcap: float | None
    temperature: float
    dtype: str
    rounds_logits: str = "float32"

    def with_layer(self, index: int, layer: Layer) -> Computation:
        """The computation with one layer replaced."""
        return self._replace(layers=(*self.layers[:index], layer, *self.layers[index + 1 :]))

    def in_dtype(self, dtype: str) -> Computation:
        """All products and states in another dtype."""
        layers = tuple(x._replace(how=x.how._replace(dtype=dtype)) for x in self.layers)
        return self._replace(layers=layers, dtype=dtype)

    def embedded(self) -> Float[Array, "B N D"]:
        """The input of the first layer."""
        x = jnp.asarray(self.embedding).astype(self.dtype)[self.ids]
        return x * jnp.asarray(self.embedding_scale, x.dtype)

    def states(
        self, first: int, last: int, x: Float[Array, "B N D"] | None = None
    ) -> Float[Array, "B N D"]:
        """State `last` from state `first`; -1 is before the embedding.

        State l is the input of layer l, and the last one comes after the final norm.
        """
        if first < 0:
            x, first = self.embedded(), 0
        x = x.astype(self.dtype)
        for layer in self.layers[first:last]:
            x = layer(x)
        if last == len(self.layers):
            x = normed(x, self.final_scale, self.final_epsilon, self.final_offset, self.dtype)
        return x

    def logprobs(self, final: Float[Array, "B N D"]) -> Float[np.ndarray, "B N"]:
        """Log-probability of each target, in nats."""
        flat, targets = final.reshape(-1, final.shape[-1]), self.targets.reshape(-1)
        found = [
            _logprobs(
                self.dtype, self.rounds_logits, flat[i : i + ROWS].astype(self.dtype), self.matrix,
                targets[i : i + ROWS], self.softcap or 0.0, self.temperature,
            )
            for i in range(0, len(flat), ROWS)
        ]  # fmt: skip
        return np.concatenate(found).reshape(self.targets.shape)


def computation_of(
    config: DecoderConfig,
    params: Params,
    ids: Int[np.ndarray, "B N"],
    targets: Int[np.ndarray, "B N"],
    dtype: str = "float32",
) -> Computation:
    """What the trainer computes; `params` are stacked by layer, and adapters are merged."""
    declared, params = config.declared, jax.tree.map(jnp.asarray, params)
    num_rows, num_tokens = ids.shape
    positions = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.float32), ids.shape)
    layers = []
    for index in range(config.num_layers):
        place = config.place("router", index)
        how = How(
            config, dtype, declared.activation, declared.offset_norms, declared.post_norms,
            ("query", "key") if declared.query_key_norm else (),
            is_dense=config.experts is None or place is None,
        )  # fmt: skip
        window = window_of(config, index)
        scalar = config.query_pre_attn_scalar or config.head_dim
        layers.append(
            Layer(
                how,
                layer_params(config, params, index),
                rotary_frequencies(config, jnp.int32(NO_WINDOW if window is None else window)),
                positions,
                jnp.broadcast_to(seen_within(num_tokens, window), (num_rows,) + (num_tokens,) * 2),
                dict.fromkeys(NORMS, config.rms_norm_eps),
                scalar**-0.5,
            )
        )
    scale = config.hidden_size**0.5 if declared.scaled_embedding else 1.0
    return Computation(
        ids, targets, tuple(layers), params["embed"]["embedding"], scale,
        params["final_norm"]["scale"], config.rms_norm_eps, declared.offset_norms,
        output_matrix(config, params), config.final_logit_softcap, 1.0, dtype,
    )  # fmt: skip


def groups_of(tensors: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Tensors that engines treat alike, as one that they fuse: names by what they are called."""
    groups = {
        "every bias": [name for name in tensors if name.endswith("/bias")],
        "every kernel": [name for name in tensors if name.endswith("/kernel")],
        "every norm": [name for name in tensors if name.endswith("/scale")],
        "query, key and value kernel": ["query/kernel", "key/kernel", "value/kernel"],
        "query and key kernel": ["query/kernel", "key/kernel"],
        "gate and up kernel": ["gate/kernel", "up/kernel"],
        "attention": [name for name in tensors if name.split("/")[0] in ATTENTION],
        "feed-forward": [name for name in tensors if name.split("/")[0] in DENSE_MODULES],
    }
    return {
        what: tuple(names)
        for what, names in groups.items()
        if len(names) > 1 and set(names) <= set(tensors)
    }


def window_of(config: DecoderConfig, layer: int) -> int | None:
    """The window of a layer; None: it has none."""
    return None if layer in config.full_attention_layers else config.sliding_window


def seen_within(num_tokens: int, window: int | None) -> Bool[Array, "1 N N"]:
    """Causal attention, perhaps in a window."""
    distance = jnp.arange(num_tokens)[:, None] - jnp.arange(num_tokens)[None, :]
    return ((distance >= 0) & (distance < (window or num_tokens + 1)))[None]


def layer_params(config: DecoderConfig, params: Params, index: int) -> Params:
    """The parameters of one layer, of those modules that it has, with adapters merged."""
    whole, places = {}, {}
    for module, leaves in params["layers"].items():
        place = config.place(module, index)
        if place is None or (module in (*DENSE_MODULES, *EXPERT_MODULES) and not leaves):
            continue
        names = [name for name in leaves if name not in (A, B)]
        whole[module] = {name: stored(params, ("layers", module, name)) for name in names}
        places[module] = np.int32(place)
    on_device = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(whole))
    # Arrays on the host: only the parts of the layer go to the device.
    return _at(whole, places) if on_device else _at.__wrapped__(whole, places)


@jax.jit
def _at(modules: Mapping[str, Any], places: Mapping[str, Int[Array, ""]]) -> Params:
    """The parts of one layer of stacked tensors; those with an adapter are merged."""

    def part(leaf, place):
        return merged(jax.tree.map(lambda x: jnp.asarray(x[place]), leaf))

    return {
        module: {name: part(leaf, places[module]) for name, leaf in leaves.items()}
        for module, leaves in modules.items()
    }


def output_matrix(config: DecoderConfig, params: Params) -> Float[Array, "V D"]:
    """The output matrix, with a row per token."""
    return params["embed"]["embedding"] if config.tie_embeddings else params["head"]["kernel"].T


@functools.partial(jax.jit, static_argnames="dtype")
def rounded(x: Array, dtype: str) -> Array:
    """Float32 values of another dtype; "float8" and "int8" have one scale for the tensor, and
    "float8/channel" and "int8/channel" one for each output.
    """
    kind, _, by = dtype.partition("/")
    if kind not in ("float8", "int8"):
        return x.astype(kind).astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-2 if by else None, keepdims=True)
    limit = 448.0 if kind == "float8" else 127.0
    scale = jnp.where(largest > 0, largest / limit, 1.0)
    scaled = x / scale
    if kind == "int8":
        return jnp.round(scaled) * scale
    return scaled.astype(jnp.float8_e4m3fn).astype(jnp.float32) * scale


def normed(x, scale, epsilon, offset, dtype):
    """Root mean square norm in float32, cast to the dtype; with an offset, by 1 + scale."""
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    shape = (1,) * (x.ndim - 1) + (-1,)
    return (x * (jnp.reshape(scale, shape) + (1.0 if offset else 0.0))).astype(dtype)


@functools.partial(jax.jit, static_argnames="how")
def _apply(how: How, layer: Layer, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
    with jax.default_matmul_precision("highest"):
        if layer.before is None:
            return _layer(how, layer, x, _heads(how, layer, layer.params, x))
        is_before = (jnp.arange(x.shape[1])[None, :] < layer.event[:, None])[:, :, None]
        old = layer.before_x.astype(how.dtype)
        cached = _heads(how, layer, layer.before, old)
        query, key, value = _heads(how, layer, layer.params, x)
        kept = [jnp.where(is_before[..., None], a, b) for a, b in zip(cached[1:], (key, value))]
        later = _layer(how, layer, x, (query, *kept))
        earlier = _layer(how, layer, x, (query, key, value))
        if how.gives_old:
            earlier = _layer(how, layer._replace(params=layer.before), old, cached)
        return jnp.where(is_before, earlier, later)


def _linear(how, params, name, x):
    leaves = params[name]
    y = x @ leaves["kernel"].astype(how.dtype)
    return y + leaves["bias"].astype(how.dtype)[None, None] if "bias" in leaves else y


def _heads(how, layer, params, x):
    config = how.config
    scale = params["attention_norm"]["scale"]
    inputs = normed(x, scale, layer.epsilon["attention_norm"], how.offset_norms, how.dtype)
    shape = (*x.shape[:2], -1, config.head_dim)
    query, key, value = (
        _linear(how, params, name, inputs).reshape(shape) for name in ("query", "key", "value")
    )
    angles = layer.positions[:, :, None].astype(how.rounds_angles)
    angles = angles * layer.frequencies[None, None, :].astype(how.rounds_angles)
    angles = angles.astype(jnp.float32)[:, :, None, :]
    table = [f(angles).astype(how.rounds_table).astype(jnp.float32) for f in (jnp.cos, jnp.sin)]

    def placed(name, x):
        """Normed and rotated, as far as the heads of this name are."""
        norm = f"{name}_norm"
        steps = [lambda x: _rotated(how, x, *table)] if name in how.rotated else []
        if name in how.normed_heads:
            options = layer.epsilon[norm], how.offset_norms, how.dtype
            steps.insert(
                len(steps) if how.norms_rotated else 0,
                lambda x: normed(x, params[norm]["scale"], *options),
            )
        for step in steps:
            x = step(x)
        return x

    key, value = (x.astype(how.rounds_cache).astype(how.dtype) for x in (placed("key", key), value))
    return placed("query", query), key, value


def _rotated(how, x, cos, sin):
    wide = x.astype(jnp.float32)
    if how.pairs == "halves":
        first, second = jnp.split(wide, 2, axis=-1)
    else:
        first, second = wide[..., ::2], wide[..., 1::2]
    turned = first * cos - second * sin, second * cos + first * sin
    if how.pairs == "halves":
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)
    return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)


def _layer(how, layer, x, heads):
    query, key, value = heads
    groups = query.shape[2] // key.shape[2]
    if how.tiles_heads:
        key, value = (jnp.tile(each, (1, 1, groups, 1)) for each in (key, value))
    else:
        key, value = (jnp.repeat(each, groups, axis=2) for each in (key, value))
    scores = jnp.einsum("bqnh,bknh->bnqk", query, key, preferred_element_type=jnp.float32)
    scores = scores * layer.score_scale
    if cap := how.config.attention_logit_softcap:
        scores = cap * jnp.tanh(scores / cap)
    scores = jnp.where(layer.seen[:, None], scores, UNSEEN)
    weights = jax.nn.softmax(scores, axis=-1).astype(how.dtype)
    attended = jnp.einsum("bnqk,bknh->bqnh", weights, value).reshape(*x.shape[:2], -1)
    params = layer.params

    def of(name, x):
        scale = params[name]["scale"]
        return normed(x, scale, layer.epsilon[name], how.offset_norms, how.dtype)

    added = _linear(how, params, "output", attended)
    x = x + (of("attention_post_norm", added) if how.post_norms else added)
    added = _feed_forward(how, params, of("mlp_norm", x))
    return x + (of("mlp_post_norm", added) if how.post_norms else added)


def _feed_forward(how, params, x):
    activation = ACTIVATION_NAMES[how.activation]
    if how.is_dense:
        features = activation(_linear(how, params, "gate", x)) * _linear(how, params, "up", x)
        return _linear(how, params, "down", features)
    kernels = Kernels(*(params[name]["kernel"].astype(how.dtype) for name in EXPERT_MODULES))
    if not how.has_slopes:
        return mixture(x, kernels, how.config.experts, activation, None)[0]
    rows = x.reshape(-1, x.shape[-1])
    chosen, weights = route(rows, kernels.router, how.config.experts)

    def of_expert(expert):
        index, gate, up, down = expert
        weight = jnp.sum(jnp.where(chosen == index, weights, 0.0), axis=1)[:, None]
        return weight * ((activation(rows @ gate) * (rows @ up)) @ down)

    every = jnp.arange(len(kernels.gate)), *kernels[1:]
    return jnp.sum(jax.lax.map(of_expert, every), axis=0).reshape(x.shape)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logprobs(dtype, rounds, states, matrix, targets, softcap, temperature):
    with jax.default_matmul_precision("highest"):
        logits = jnp.matmul(states, matrix.astype(dtype).T, preferred_element_type=jnp.float32)
        cap = jnp.where(softcap > 0, softcap, 1.0)
        logits = jnp.where(softcap > 0, cap * jnp.tanh(logits / cap), logits)
        logits = logits.astype(rounds).astype(jnp.float32) / temperature
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)
