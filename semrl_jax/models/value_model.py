"""A decoder with a scalar head in place of the output matrix: a critic or a reward model."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from semrl_jax.models.decoder_config import DecoderConfig
from semrl_jax.models.directory import load_params, read_tensors
from semrl_jax.models.hf_weights import HEAD
from semrl_jax.models.hosts import from_host
from semrl_jax.models.lora import VALUE_HEAD
from semrl_jax.models.policy import Params, Policy

KERNEL, BIAS = "score.weight", "score.bias"  # of the classifiers of transformers


@dataclasses.dataclass(frozen=True)
class ValueModel:
    """One float32 value per state, from `value_head: {kernel [D], bias []}`; static under jit."""

    decoder: Policy  # with tied embeddings, so that it has no output matrix; see `of`

    @classmethod
    def of(cls, policy: Policy) -> ValueModel:
        """The value model with the architecture, dtype, remat and mesh of a policy."""
        config = dataclasses.replace(policy.config, tie_embeddings=True)
        return cls(dataclasses.replace(policy, config=config))

    def init(self, key: Array) -> Params:
        """Random decoder parameters and a head of zeros."""
        return with_head(self.decoder.init(key))

    @property
    def config(self) -> DecoderConfig:
        return self.decoder.config

    def shapes(self) -> Params:
        """The same tree as `init` with jax.ShapeDtypeStruct leaves; computes nothing."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def final_states(self, params: Params, *inputs: Any) -> Float[Array, "B S D"]:
        """See `Policy.final_states`."""
        return self.decoder.final_states(_without_head(params), *inputs)

    def states_at(
        self, states: Float[Array, "B S D"], columns: Int[Array, "B U"]
    ) -> Float[Array, "B U D"]:
        """See `Policy.states_at`."""
        return self.decoder.states_at(states, columns)

    def values(self, params: Params, states: Float[Array, "*axes D"]) -> Float[Array, "*axes"]:
        """kernel . state + bias, in float32 for any compute dtype."""
        head = params[VALUE_HEAD]
        # "highest": an accelerator would round the inputs to bfloat16.
        product = jnp.matmul(states.astype(jnp.float32), head["kernel"], precision="highest")
        return product + head["bias"]


def with_head(decoder: Params, kernel: Any = None, bias: Any = 0.0) -> Params:
    """Parameters of a value model from a decoder's, with a NumPy head; zeros without a kernel."""
    if kernel is None:
        kernel = np.zeros(decoder["final_norm"]["scale"].shape, np.float32)
    head = {"kernel": np.asarray(kernel, np.float32), "bias": np.asarray(bias, np.float32)}
    return {name: part for name, part in decoder.items() if name != "head"} | {VALUE_HEAD: head}


def load_value_params(
    path: str | os.PathLike[str], model: ValueModel, shardings: Any = None
) -> Params:
    """Float32 parameters of a Hugging Face directory, as `load_params` reads them.

    The head of a causal language model becomes zeros; that of a sequence or token classifier with
    one label is kept.
    """
    config = model.config
    decoder_shardings = None if shardings is None else _without_head(shardings)
    decoder = load_params(path, config, decoder_shardings, others=_others(config))
    head = read_head(path, model)
    params = with_head(decoder, head.get(KERNEL, [None])[0], head.get(BIAS, [0.0])[0])
    if shardings is not None:
        params[VALUE_HEAD] = jax.tree.map(from_host, params[VALUE_HEAD], shardings[VALUE_HEAD])
    return params


def read_head(path: str | os.PathLike[str], model: ValueModel) -> dict[str, np.ndarray]:
    """The tensors of a classifier's head by name, {} without one; UserError if they do not fit."""
    config = model.config
    return read_tensors(path, config, _others(config), (KERNEL, BIAS))


def _others(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """What a directory may have in addition to the decoder. The output matrix is not read."""
    width = config.hidden_size
    return {KERNEL: (1, width), BIAS: (1,), HEAD: (config.vocab_size, width)}


def _without_head(params: Params) -> Params:
    return {name: part for name, part in params.items() if name != VALUE_HEAD}
