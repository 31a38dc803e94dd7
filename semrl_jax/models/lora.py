"""Low-rank adapters: x W + scale (x A) B in place of x W, in linear modules of all layers.

The base W is frozen and may be in bfloat16. Adapters are a tree of their own with the decoder's
names, {"layers": {"query": {"lora_a": [L, I, R], "lora_b": [L, R, O]}}}, in float32. `adapted`
joins the two trees to one that `Policy` takes like any other; nothing is copied but `lora_b`.

Source: arXiv:2106.09685, Sec. 4.1. Initial values and scale as in PEFT: A uniform in
+-1/sqrt(I) (Kaiming with a = sqrt(5)), B zero, so that a new adapter changes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from semrl_jax.models.pinned import fetched

A, B = "lora_a", "lora_b"
VALUE_HEAD = "value_head"
MAX_ALPHA = 1e30  # with more, products overflow float32
Params = dict[str, Any]
Product = Callable[[Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class Lora:
    """What an adapter is."""

    modules: tuple[str, ...]  # of a decoder's layer, such as "query"
    rank: int  # R, at least 1
    alpha: float  # the product A B is scaled by alpha / R
    rank_stabilized: bool = False  # by alpha / sqrt(R) instead (arXiv:2312.03732)
    dropout: float = 0.0  # of `Dropout`, in updates

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def base(self, params: Params) -> Base:
        """Frozen parameters, which this adapter changes."""
        return Base(params, np.float32(self.scale))

    def shapes(self, base: Params) -> Params:
        """The tree of `init` with jax.ShapeDtypeStruct leaves; `base` has arrays or shapes."""

        def of(kernel):
            layers, num_in, num_out = kernel.shape
            shapes = {A: (layers, num_in, self.rank), B: (layers, self.rank, num_out)}
            return {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}

        return {"layers": {name: of(base["layers"][name]["kernel"]) for name in self.modules}}

    def trained_shapes(self, model: Params) -> Params:
        """Shapes of what is trained in a policy or a value model: adapters, and a value head."""
        head = {name: model[name] for name in (VALUE_HEAD,) if name in model}
        return self.shapes(model) | head

    def init(self, base: Params, seed: int) -> Params:
        """A new adapter in NumPy, a function of the seed; `base` has arrays or shapes."""
        random = np.random.default_rng(seed)

        def of(shapes):
            bound = 1 / math.sqrt(shapes[A].shape[1])
            first = random.uniform(-bound, bound, shapes[A].shape).astype(np.float32)
            return {A: first, B: np.zeros(shapes[B].shape, np.float32)}

        layers = self.shapes(base)["layers"]
        return {"layers": {name: of(layers[name]) for name in sorted(layers)}}


class Base(NamedTuple):
    """Frozen parameters and the scale of the adapters upon them; a pytree."""

    params: Params
    scale: Float[Array | np.generic, ""]


def adapted(trained: Params, base: Base | None) -> Params:
    """The parameters of a model: `trained`, or adapters upon the base, with `lora_b` scaled."""
    if base is None:
        return trained
    layers = dict(base.params["layers"])
    for name, pair in trained["layers"].items():
        layers[name] = layers[name] | {A: pair[A], B: base.scale * fetched(pair[B])}
    return base.params | trained | {"layers": layers}


class Dropout(NamedTuple):
    """Zeros in the inputs of adapters, and only there, as `lora_dropout` of PEFT; a pytree.

    A mask is a function of the numbers of its token, the layer, the module and the feature. So it
    depends neither on the mesh nor on where a token lies, and a backward pass finds it again.
    """

    rate: float  # share of zeros
    words: Int[Array, "B S"]  # of the update
    numbers: Int[Array, "B S"]  # of the token in it
    layer: Int[Array, ""] | int = 0

    def __call__(self, x: Float[Array, "B S I"], module: str) -> Float[Array, "B S I"]:
        """x / (1 - rate) where it is kept, and 0 elsewhere."""
        place = zlib.crc32(module.encode())

        def kept(word, number):
            numbers = jnp.stack([word, number]).astype(jnp.uint32)
            key = jax.random.wrap_key_data(numbers, impl="threefry2x32")
            key = jax.random.fold_in(jax.random.fold_in(key, self.layer), place)
            return jax.random.bernoulli(key, 1 - self.rate, x.shape[-1:])

        return jnp.where(jax.vmap(jax.vmap(kept))(self.words, self.numbers), x / (1 - self.rate), 0)


class AdaptedLinear(nnx.Linear):
    """nnx.Linear, with an adapter where `add_adapters` has added one."""

    def __init__(self, *args: Any, module: str, of_a: Product, of_b: Product, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.module, self.of_a, self.of_b = module, of_a, of_b

    def __call__(
        self, x: Float[Array, "*axes I"], dropout: Dropout | None = None
    ) -> Float[Array, "*axes O"]:
        y = super().__call__(x)
        if not hasattr(self, A):
            return y
        first, second = (getattr(self, name)[...].astype(y.dtype) for name in (A, B))
        x = x.astype(y.dtype)
        if dropout is not None:
            x = dropout(x, self.module)
        # The narrow product first: neither A B nor a merged kernel exists in a forward pass.
        return y + self.of_b(self.of_a(x, first), second)


def modules_with_adapters(layers: Params) -> tuple[str, ...]:
    """The modules of the result of `adapted` that have an adapter, sorted."""
    return tuple(sorted(name for name, leaves in layers.items() if A in leaves))


def rank_of(params: Params) -> int:
    """The rank of the adapters in the result of `adapted`; 0: there are none."""
    layers = params["layers"]
    return next((layers[name][A].shape[-1] for name in modules_with_adapters(layers)), 0)


def without_adapters(params: Params) -> Params:
    """The base in the result of `adapted`."""
    layers = {
        name: {leaf: array for leaf, array in leaves.items() if leaf not in (A, B)}
        for name, leaves in params["layers"].items()
    }
    return params | {"layers": layers}


def on_layers(layers: Sequence[Params], adapters: Sequence[Params]) -> tuple[Params, ...]:
    """Layers of an engine, see `policy.unstacked`, with these adapters in place of earlier ones."""

    def of(base, own):
        kept = {leaf: array for leaf, array in base.items() if leaf not in (A, B)}
        return kept | own

    return tuple(
        {name: of(leaves, own.get(name, {})) for name, leaves in layer.items()}
        for layer, own in zip(layers, adapters, strict=True)
    )


def add_adapters(layers: nnx.Module, modules: Iterable[str]) -> None:
    """Adds parameters without values to an abstract module, for its graph."""
    for name in modules:
        for leaf in (A, B):
            nothing = jax.ShapeDtypeStruct((), jnp.float32)
            setattr(getattr(layers, name), leaf, nnx.Param(nothing))


class Adapted(NamedTuple):
    """A kernel and its adapter; a pytree."""

    kernel: Float[Array, "*L I O"]
    first: Float[Array, "*L I R"]
    second: Float[Array, "*L R O"]  # scaled


def stored(params: Params, path: Sequence[str]) -> Array | np.ndarray | Adapted:
    """The leaf at a path, with its adapter if it is a kernel that has one."""
    node = functools.reduce(operator.getitem, path[:-1], params)
    leaf = node[path[-1]]
    return Adapted(leaf, node[A], node[B]) if path[-1] == "kernel" and A in node else leaf


def merged(leaf: Array | Adapted) -> Array:
    """W + scale A B in float32; a leaf without an adapter as it is."""
    if not isinstance(leaf, Adapted):
        return leaf
    product = jnp.matmul(leaf.first, leaf.second, precision="highest")
    return leaf.kernel.astype(jnp.float32) + product
