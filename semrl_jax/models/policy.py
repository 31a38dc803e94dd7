"""What other rooms call: pure functions from plain dicts of arrays to states and log-probs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from semrl_jax.errors import UserError
from semrl_jax.models.config import DecoderConfig
from semrl_jax.models.decoder import Decoder, KVCache

Params = dict[str, Any]
DTYPES = {name: jnp.dtype(name) for name in ("float32", "bfloat16")}
REMAT_POLICIES = ("none", "full", "dots")


@dataclasses.dataclass(frozen=True)
class Policy:
    """A decoder without its parameters: hashable, static under jit, rebuilt from config.

    Attributes:
      config: the architecture.
      compute_dtype: "float32" or "bfloat16"; parameters are float32 either way.
      remat: what the backward pass recomputes: "none", "full" or "dots" (keeps matrix products).
    """

    config: DecoderConfig
    compute_dtype: str = "float32"
    remat: str = "none"

    def __post_init__(self):
        if self.compute_dtype not in DTYPES:
            raise UserError(
                f"model.compute_dtype={self.compute_dtype!r} must be one of {tuple(DTYPES)}."
            )
        if self.remat not in REMAT_POLICIES:
            raise UserError(f"model.remat={self.remat!r} must be one of {REMAT_POLICIES}.")

    def init(self, key: Array) -> Params:
        """Random float32 parameters, a nested dict with one stacked array a layer parameter."""
        module = self._module(nnx.Rngs(key))
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))

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

    def prefill(
        self,
        params: Params,
        token_ids: Int[Array, "B P"],
        positions: Int[Array, "B P"],
        segment_ids: Int[Array, "B P"],
    ) -> tuple[Float[Array, "B D"], Float[Array, "L B D"], KVCache]:
        """See `Decoder.prefill`."""
        return self._bind(params).prefill(token_ids, positions, segment_ids)

    def decode(
        self,
        params: Params,
        token_ids: Int[Array, " B"],
        positions: Int[Array, " B"],
        columns: Int[Array, " B"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B D"], Float[Array, "L B D"], KVCache]:
        """See `Decoder.decode`."""
        return self._bind(params).decode(token_ids, positions, columns, cache)

    def logits(self, params: Params, states: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Float32 logits of final states."""
        return _float32_product(states, self._bind(params).output_matrix())

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

        Works through blocks of at most `max_logits` logits, and again in the backward pass, so
        that [B, T, V] never exists in float32.

        Args:
          states: row t is the state whose logits produced token t.
          token_ids: int32.
          temperature: divides the logits, > 0; the rollout temperature (METHOD: both algorithms).
          max_logits: float32 logits held at once (64 MiB by default).

        Returns:
          Float32 log-probabilities and entropies, nats.
        """
        matrix = self._bind(params).output_matrix()
        batch, length, width = states.shape
        num_tokens = batch * length
        num_blocks = -(-num_tokens * self.config.vocab_size // max_logits)
        block = -(-num_tokens // num_blocks)
        padding = num_blocks * block - num_tokens
        flat_states = jnp.pad(states.reshape(num_tokens, width), ((0, padding), (0, 0)))
        flat_ids = jnp.pad(token_ids.reshape(num_tokens), (0, padding))

        @jax.checkpoint
        def of_block(inputs):
            block_states, block_ids = inputs
            logits = _float32_product(block_states, matrix) / temperature  # [block, V]
            log_z = jax.nn.logsumexp(logits, axis=-1)
            chosen = jnp.take_along_axis(logits, block_ids[:, None], axis=-1)[:, 0]
            probabilities = jnp.exp(logits - log_z[:, None])
            return chosen - log_z, log_z - jnp.sum(probabilities * logits, axis=-1)

        logprobs, entropy = jax.lax.map(
            of_block,
            (
                flat_states.reshape(num_blocks, block, width),
                flat_ids.reshape(num_blocks, block),
            ),
        )
        shape = (batch, length)
        return (
            logprobs.reshape(-1)[:num_tokens].reshape(shape),
            entropy.reshape(-1)[:num_tokens].reshape(shape),
        )

    def _module(self, rngs: nnx.Rngs) -> Decoder:
        return Decoder(self.config, dtype=DTYPES[self.compute_dtype], remat=self.remat, rngs=rngs)

    @functools.cached_property
    def _graph(self):
        return nnx.graphdef(nnx.eval_shape(lambda: self._module(nnx.Rngs(0))))

    def _bind(self, params: Params) -> Decoder:
        return nnx.merge(self._graph, params)


def _float32_product(
    states: Float[Array, "B D"], matrix: Float[Array, "D V"]
) -> Float[Array, "B V"]:
    return jnp.matmul(states, matrix, preferred_element_type=jnp.float32)
