"""The interface of the room: functions from plain dicts of arrays to states and log-probs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Integer, Shaped

from semrl_jax.models.attention_kernels import choose_kernel
from semrl_jax.models.decoder import Decoded, Decoder
from semrl_jax.models.decoder_config import DecoderConfig
from semrl_jax.models.lora import Dropout, Params, add_adapters, modules_with_adapters
from semrl_jax.models.sharding import (
    ACTIVATION_SPECS,
    DATA_AXES,
    constrain,
    parameter_shardings,
    platform_of,
)
from semrl_jax.models.token_logprobs import Other, Tiles
from semrl_jax.models.token_logprobs import token_logprobs as tiled_logprobs

# The attention of one query to one key takes as long as this many multiplications for each element
# of a head. Two are its own: for the score and for the value. The softmax takes the rest on a CPU.
KEY_COST = 8
# GPUs and TPUs read the bfloat16 weights of a product in the time that about this many tokens'
# multiplications take: 990 TFLOP/s by 4.8 TB/s on an H200, 197 by 0.82 on a v5e.
TOKENS_PER_READ = 200


@dataclasses.dataclass(frozen=True)
class Policy:
    """A decoder without its parameters: hashable, static under jit, rebuilt from config."""

    config: DecoderConfig
    compute_dtype: str = "float32"  # or "bfloat16"; parameters are float32 either way
    # What the backward pass recomputes: "none", "full" or "dots" (all but matrix products).
    remat: str = "none"
    # Splits parameters and activations by the tables of sharding.py. None or a mesh of one device:
    # the program has no layout.
    mesh: Mesh | None = None
    attention: str = "auto"  # of whole sequences; see `choose_kernel`

    def init(self, key: Array) -> Params:
        """Random float32 parameters: a nested dict, with one stacked array per layer parameter."""
        return nnx.to_pure_dict(nnx.state(self._module(nnx.Rngs(key)), nnx.Param))

    def shapes(self) -> Params:
        """The same tree as `init` with jax.ShapeDtypeStruct leaves; computes nothing."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def final_states(
        self,
        params: Params,
        token_ids: Int[Array, "B S"],
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"],
        dropout: Dropout | None = None,
        experts: Integer[Array, "B S M C"] | None = None,
    ) -> Float[Array, "B S D"]:
        """States after the final norm; see `Decoder.__call__`."""
        return self._bind(params)(token_ids, positions, segment_ids, dropout, experts)

    def prefill(self, params: Params, *inputs: Any) -> Decoded:
        """See `Decoder.prefill`."""
        return self._bind(params).prefill(*inputs)

    def decode(self, params: Params, *inputs: Any) -> Decoded:
        """See `Decoder.decode`."""
        return self._bind(params).decode(*inputs)

    def extend(self, params: Params, *inputs: Any) -> Decoded:
        """See `Decoder.extend`."""
        return self._bind(params).extend(*inputs)

    def logits(self, params: Params, states: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Float32 logits of final states."""
        matrix, vocabulary_axis = self._bind(params).output_weights()
        matrix = matrix if vocabulary_axis else matrix.T
        logits = jnp.matmul(states, matrix, preferred_element_type=jnp.float32)
        if cap := self.config.final_logit_softcap:
            logits = cap * jnp.tanh(logits / cap)
        return constrain(logits, "logits", self._split)

    def states_at(
        self, states: Float[Array, "B S D"], columns: Int[Array, "B U"]
    ) -> Float[Array, "B U D"]:
        """The states of the given columns of each row; columns are int32, in [0, S).

        If the mesh splits columns, only the requested states travel.
        """
        mesh = self._split
        if mesh is None:
            return jnp.take_along_axis(states, columns[:, :, None], axis=1)

        def of_shard(states, columns):
            size = states.shape[1]
            own = columns - jax.lax.axis_index("sequence") * size
            here, inside = jnp.clip(own, 0, size - 1), (own >= 0) & (own < size)
            found = jnp.take_along_axis(states, here[:, :, None], axis=1)
            # One device has the state and the others have zeros, so the sum is exact.
            found = jnp.where(inside[:, :, None], found, jnp.zeros((), found.dtype))
            return jax.lax.psum_scatter(found, "sequence", scatter_dimension=1, tiled=True)

        found = jax.shard_map(
            of_shard,
            mesh=mesh,
            in_specs=(ACTIVATION_SPECS["states"], PartitionSpec(DATA_AXES)),
            out_specs=ACTIVATION_SPECS["states"],
        )(self._padded(states), self._padded(columns))
        return found[: columns.shape[0], : columns.shape[1]]

    def token_logprobs(
        self,
        params: Params,
        states: Float[Array, "B T D"],
        token_ids: Int[Array, "B T"],
        *,
        temperature: float = 1.0,
        max_logits: int | None = None,
        other: tuple[Policy, Params, Float[Array, "B T E"]] | None = None,
    ) -> tuple[Float[Array, "B T"], ...]:
        """Log-probability of each token and entropy of its distribution; float32 nats.

        Computes the logits in tiles, forward and again in the backward pass, so that [B, T, V]
        never exists. On a mesh, a device has its rows, columns and slice of the vocabulary. Sums
        over the vocabulary travel, logits do not.

        Args:
          states: row t is the state whose logits produced token t.
          token_ids: int32.
          temperature: divides the logits, > 0; the rollout temperature (METHOD: both algorithms).
          max_logits: float32 logits that a device holds at once; None: `logits_at_once`.
          other: another policy with at least as many tokens, its parameters and its states. The
            third result is then KL(own || other), its distribution restricted to own tokens.
        """
        mesh, given = self._split, [(self, params, states), *([other] if other else [])]
        matrices, tiles = [], []
        for policy, own, _ in given:
            matrix, vocabulary_axis = policy._bind(own).output_weights()
            if policy.config.vocab_size > self.config.vocab_size:
                size = self.config.vocab_size
                matrix = jax.lax.slice_in_dim(matrix, 0, size, axis=vocabulary_axis)
            matrices.append(matrix)
            tiles.append(
                Tiles(
                    vocabulary_axis=vocabulary_axis,
                    temperature=temperature,
                    softcap=policy.config.final_logit_softcap,
                    max_logits=max_logits or logits_at_once(self._platform),
                    axis=None if mesh is None else "tensor",
                )
            )

        def of_tokens(token_ids, *pairs):
            flat = token_ids.reshape(-1)
            (own, matrix), *rest = [(x.reshape(len(flat), -1), matrix) for x, matrix in pairs]
            compared = (Other(*rest[0]), tiles[1]) if rest else ()
            found = tiled_logprobs(own, flat, matrix, tiles[0], *compared)
            return tuple(x.reshape(token_ids.shape) for x in found)

        pairs = list(zip((states for *_, states in given), matrices, strict=True))
        if mesh is None:
            return of_tokens(token_ids, *pairs)

        def of_shard(token_ids, *pairs):
            return of_tokens(token_ids, *map(gathered, pairs, tiles))

        def gathered(pair, tiles):
            states, matrix = pair
            # Outside the loop over tiles, so that the sums in the gradient are outside too. `pcast`
            # is before the gather: the gradient is scattered first, and then a part is summed.
            matrix = jax.lax.pcast(matrix, ("replica", "sequence", "expert"), to="varying")
            # The parts are gathered next to each other and then joined: see `gather_kernel`.
            axis, own = 1 - tiles.vocabulary_axis, matrix
            parts = jax.lax.all_gather(own, "fsdp", axis=0)  # [fsdp, _, _]
            shape = [-1 if i == axis else size for i, size in enumerate(own.shape)]
            matrix = jnp.moveaxis(parts, 0, axis).reshape(shape)
            return jax.lax.pcast(states, "tensor", to="varying"), matrix

        rows, columns = token_ids.shape
        of_pairs = [
            (
                ACTIVATION_SPECS["states"],
                PartitionSpec(*("fsdp", "tensor")[:: 1 if each.vocabulary_axis else -1]),
            )
            for each in tiles
        ]
        found = jax.shard_map(
            of_shard,
            mesh=mesh,
            in_specs=(ACTIVATION_SPECS["tokens"], *of_pairs),
            out_specs=ACTIVATION_SPECS["tokens"],
        )(self._padded(token_ids), *((self._padded(x), matrix) for x, matrix in pairs))  # fmt: skip
        return tuple(x[:rows, :columns] for x in found)

    def _padded(self, x: Shaped[Array, "B S *dims"]) -> Shaped[Array, "_ _ *dims"]:
        """With an equal number of rows and columns per device."""
        shape = self._split.shape
        rows = -x.shape[0] % math.prod(shape[axis] for axis in DATA_AXES)
        columns = -x.shape[1] % shape["sequence"]
        return jnp.pad(x, ((0, rows), (0, columns)) + ((0, 0),) * (x.ndim - 2))

    def _module(self, rngs: nnx.Rngs) -> Decoder:
        return Decoder(
            self.config, dtype=jnp.dtype(self.compute_dtype), remat=self.remat, mesh=self._split,
            rngs=rngs, kernel=self.kernel, platform=self._platform,
        )  # fmt: skip

    @property
    def kernel(self) -> str:
        """The kernel of attention to whole sequences; raises as `choose_kernel`."""
        return choose_kernel(self.attention, self.config, self._split, self._platform)

    @property
    def attention_columns(self) -> float:
        """`layer_columns` for whole sequences; 0 with a fused kernel, which shares no prompt."""
        return self.layer_columns if self.kernel == "xla" else 0.0

    @property
    def layer_columns(self) -> float:
        """How many keys make the attention of a token as slow as the products of its layer."""
        width = self.config.num_heads * self.config.head_dim
        return self.config.layer_products / (KEY_COST * width)

    @property
    def tokens_per_read(self) -> int:
        """Tokens of a decoding step whose products cost no more than reading the weights does."""
        return 1 if self._platform == "cpu" else TOKENS_PER_READ

    def check_attention(self, mesh: Mesh) -> None:
        """UserError if the kernel that `attention` names does not fit the model or this mesh."""
        _ = dataclasses.replace(self, mesh=mesh).kernel

    @property
    def _split(self) -> Mesh | None:
        """The mesh; None if it splits nothing."""
        return None if self.mesh is None or self.mesh.size == 1 else self.mesh

    @property
    def _platform(self) -> str:
        """Platform of the devices that run the program; others may compile it."""
        return platform_of(self.mesh)

    def _bind(self, params: Params) -> Decoder:
        if isinstance(params["layers"], tuple):  # the compiler removes stacks that are sliced again
            params = params | {"layers": _stacked(params["layers"])}
        elif mesh := self._split:  # the gradient of the parameters has the same layout
            shardings = parameter_shardings(params, mesh)
            params = jax.lax.with_sharding_constraint(params, shardings)
        return nnx.merge(_graph(self, modules_with_adapters(params["layers"])), params)


def logits_at_once(platform: str) -> int:
    """Float32 logits that a device holds at once; the cache of a CPU then holds most of them."""
    return 2**22 if platform == "cpu" else 2**24


@functools.cache
def _graph(policy: Policy, adapted: tuple[str, ...]) -> nnx.GraphDef:
    module = nnx.eval_shape(lambda: policy._module(nnx.Rngs(0)))
    add_adapters(module.layers, adapted)
    return nnx.graphdef(module)


def unstacked(params: Params, config: DecoderConfig) -> Params:
    """Parameters with a tuple of layers, for `Policy.prefill`, `decode` and `logits`.

    Kernels are transposed to [out, in], as Hugging Face has them: see `decoder._product_of_few`.
    """
    places = (
        {name: config.place(name, layer) for name in params["layers"]}
        for layer in range(config.num_layers)
    )
    layers = (
        {
            name: jax.tree.map(lambda leaf, i=place: _transposed(leaf[i]), params["layers"][name])
            for name, place in of_layer.items()
            if place is not None
        }
        for of_layer in places
    )
    return params | {"layers": tuple(layers)}


def _transposed(leaf: Array | np.ndarray) -> Array | np.ndarray:
    """A kernel of one layer with its axes exchanged; other parameters as they are."""
    return leaf.T if leaf.ndim == 2 else leaf


def _stacked(layers: Sequence[Params]) -> Params:
    """The inverse of `unstacked`: each module of those layers that have it."""
    names = dict.fromkeys(name for layer in layers for name in layer)
    return {
        name: jax.tree.map(
            lambda *leaves: jnp.stack(list(map(_transposed, leaves))),
            *(layer[name] for layer in layers if name in layer),
        )
        for name in names
    }
