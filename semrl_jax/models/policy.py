"""The interface of the room: functions from plain dicts of arrays to states and log-probs."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from semrl_jax.models.config import DecoderConfig
from semrl_jax.models.decoder import Decoded, Decoder
from semrl_jax.models.sharding import ACTIVATION_SPECS, DATA_AXES, constrain, parameter_shardings

Params = dict[str, Any]


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
    ) -> Float[Array, "B S D"]:
        """States after the final norm; see `Decoder.__call__`."""
        return self._bind(params)(token_ids, positions, segment_ids)

    def prefill(self, params: Params, *inputs: Any) -> tuple[*Decoded, Float[Array, "B P K D"]]:
        """See `Decoder.prefill`."""
        return self._bind(params).prefill(*inputs)

    def decode(self, params: Params, *inputs: Any) -> Decoded:
        """See `Decoder.decode`."""
        return self._bind(params).decode(*inputs)

    def logits(self, params: Params, states: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Float32 logits of final states."""
        matrix = self._bind(params).output_matrix()
        logits = jnp.matmul(states, matrix, preferred_element_type=jnp.float32)
        return constrain(logits, "logits", self._split)

    def states_at(
        self, states: Float[Array, "B S D"], columns: Int[Array, "B U"]
    ) -> Float[Array, "B U D"]:
        """The states of the given columns of each row.

        If the mesh splits columns, a device has the states of some of them. Only the requested
        states travel over the axis, once forward and once in the gradient.

        Args:
          states: laid out as `final_states` returns them.
          columns: int32, in [0, S).
        """
        mesh = self._split
        if mesh is None:
            return jnp.take_along_axis(states, columns[:, :, None], axis=1)

        def of_shard(states, columns):
            here, inside = _in_shard(columns, "sequence", states.shape[1])
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
        max_logits: int = 2**24,
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """Log-probability of each token and entropy of its distribution.

        Computes blocks of at most `max_logits` logits, forward and again in the backward pass, so
        that [B, T, V] never exists in float32. On a mesh, a device has its rows, columns and slice
        of the vocabulary. Sums over the vocabulary travel, logits do not.

        Args:
          states: row t is the state whose logits produced token t.
          token_ids: int32.
          temperature: divides the logits, > 0; the rollout temperature (METHOD: both algorithms).
          max_logits: float32 logits that a device holds at once (64 MiB by default).

        Returns:
          Float32 log-probabilities and entropies, nats.
        """
        matrix = self._bind(params).output_matrix()
        of_tokens = functools.partial(
            _token_logprobs, temperature=temperature, max_logits=max_logits
        )
        mesh = self._split
        if mesh is None:
            return of_tokens(states, token_ids, matrix)

        def of_shard(states, token_ids, matrix):
            # Outside the loop over blocks, so that the sums in the gradient are outside too.
            matrix = jax.lax.all_gather(matrix, "fsdp", axis=0, tiled=True)
            matrix = jax.lax.pcast(matrix, ("replica", "sequence"), to="varying")
            states = jax.lax.pcast(states, "tensor", to="varying")
            return of_tokens(states, token_ids, matrix, axis="tensor")

        rows, columns = token_ids.shape
        logprobs, entropies = jax.shard_map(
            of_shard,
            mesh=mesh,
            in_specs=(
                ACTIVATION_SPECS["states"], ACTIVATION_SPECS["tokens"],
                PartitionSpec("fsdp", "tensor"),
            ),
            out_specs=ACTIVATION_SPECS["tokens"],
        )(self._padded(states), self._padded(token_ids), matrix)  # fmt: skip
        return logprobs[:rows, :columns], entropies[:rows, :columns]

    def _padded(self, x: Shaped[Array, "B S *dims"]) -> Shaped[Array, "_ _ *dims"]:
        """With an equal number of rows and columns per device."""
        shape = self._split.shape
        rows = -x.shape[0] % (shape["replica"] * shape["fsdp"])
        columns = -x.shape[1] % shape["sequence"]
        return jnp.pad(x, ((0, rows), (0, columns)) + ((0, 0),) * (x.ndim - 2))

    def _module(self, rngs: nnx.Rngs) -> Decoder:
        dtype = jnp.dtype(self.compute_dtype)
        return Decoder(self.config, dtype=dtype, remat=self.remat, mesh=self._split, rngs=rngs)

    @property
    def _split(self) -> Mesh | None:
        """The mesh; None if it splits nothing."""
        return None if self.mesh is None or self.mesh.size == 1 else self.mesh

    @functools.cached_property
    def _graph(self):
        return nnx.graphdef(nnx.eval_shape(lambda: self._module(nnx.Rngs(0))))

    def _bind(self, params: Params) -> Decoder:
        if isinstance(params["layers"], tuple):  # the compiler removes stacks that are sliced again
            layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])
            params = params | {"layers": layers}
        elif mesh := self._split:  # the gradient of the parameters has the same layout
            shardings = parameter_shardings(params, mesh)
            params = jax.lax.with_sharding_constraint(params, shardings)
        return nnx.merge(self._graph, params)


def unstacked(params: Params) -> Params:
    """Parameters with a tuple of layers, for `Policy.prefill`, `decode` and `logits`.

    These programs run each layer on its own. Without stacks they need not copy it out of them.
    """
    count = jax.tree.leaves(params["layers"])[0].shape[0]
    layers = (jax.tree.map(operator.itemgetter(i), params["layers"]) for i in range(count))
    return params | {"layers": tuple(layers)}


def _in_shard(
    indices: Int[Array, "*dims"], axis: str, size: int
) -> tuple[Int[Array, "*dims"], Bool[Array, "*dims"]]:
    """Indices into this device's `size` elements of an axis, clipped, and which were inside."""
    indices = indices - jax.lax.axis_index(axis) * size
    return jnp.clip(indices, 0, size - 1), (indices >= 0) & (indices < size)


def _token_logprobs(
    states: Float[Array, "B T D"],
    token_ids: Int[Array, "B T"],
    matrix: Float[Array, "D V"],
    *,
    temperature: float,
    max_logits: int,
    axis: str | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`Policy.token_logprobs` of one device's tokens and its slice of the vocabulary.

    `axis` is the mesh axis over which the vocabulary is split; None: it is not split.
    """
    batch, length, width = states.shape
    vocabulary = _Vocabulary(matrix.shape[1], axis)
    num_tokens = batch * length
    num_blocks = -(-num_tokens * vocabulary.size // max_logits)
    block = -(-num_tokens // num_blocks)
    padding = num_blocks * block - num_tokens
    flat_states = jnp.pad(states.reshape(num_tokens, width), ((0, padding), (0, 0)))
    flat_ids = jnp.pad(token_ids.reshape(num_tokens), (0, padding))

    @jax.checkpoint
    def of_block(inputs):
        block_states, block_ids = inputs
        logits = jnp.matmul(block_states, matrix, preferred_element_type=jnp.float32)
        logits = logits / temperature  # [block, V]
        log_z = vocabulary.logsumexp(logits)
        chosen = vocabulary.chosen(logits, block_ids)
        probabilities = jnp.exp(logits - log_z[:, None])
        return chosen - log_z, log_z - vocabulary.sum(probabilities * logits)

    blocks = flat_states.reshape(num_blocks, block, width), flat_ids.reshape(num_blocks, block)
    logprobs, entropies = (
        x.reshape(-1)[:num_tokens].reshape(batch, length) for x in jax.lax.map(of_block, blocks)
    )
    return logprobs, entropies


class _Vocabulary(NamedTuple):
    """Reductions over logits. A device has `size` columns of them; all if `axis` is None."""

    size: int
    axis: str | None

    def sum(self, values: Float[Array, "B V"]) -> Float[Array, " B"]:
        total = jnp.sum(values, axis=-1)
        return total if self.axis is None else jax.lax.psum(total, self.axis)

    def logsumexp(self, logits: Float[Array, "B V"]) -> Float[Array, " B"]:
        if self.axis is None:
            return jax.nn.logsumexp(logits, axis=-1)
        peak = jax.lax.pmax(jnp.max(jax.lax.stop_gradient(logits), axis=-1), self.axis)
        return peak + jnp.log(self.sum(jnp.exp(logits - peak[:, None])))

    def chosen(self, logits: Float[Array, "B V"], ids: Int[Array, " B"]) -> Float[Array, " B"]:
        if self.axis is None:
            return jnp.take_along_axis(logits, ids[:, None], axis=-1)[:, 0]
        here, inside = _in_shard(ids, self.axis, self.size)
        found = jnp.take_along_axis(logits, here[:, None], axis=-1)[:, 0]
        return jax.lax.psum(jnp.where(inside, found, 0.0), self.axis)
