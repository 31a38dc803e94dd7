"""The losses that a client names, each summed over all tokens of all sequences.

They take log-probabilities p of the target tokens, with gradient, and arrays of the same shape that
the client sends: weights w, or advantages A and the sampler's log-probabilities q. r = exp(p - q).
`sg` stops the gradient.

Source: the pages "Loss functions" and "GSPO" of Tinker's documentation, with the defaults of the
first. Those of GSPO are the paper's (arXiv 2507.18071, section 5.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Tokens = Float[Array, "B T"]
Inputs = Mapping[str, Tokens]
Options = Mapping[str, Float[Array, ""]]


class Loss(NamedTuple):
    """A loss of each token.

    Attributes:
      terms: from (p, inputs, options) to the loss of each token.
      inputs: the arrays that it needs in addition to the target tokens.
      options: its options with their defaults.
      optional: inputs that are 1 if the client does not send them.
    """

    terms: Callable[[Tokens, Inputs, Options], Tokens]
    inputs: tuple[str, ...]
    options: Mapping[str, float]
    optional: tuple[str, ...] = ()


def cross_entropy(p: Tokens, inputs: Inputs, options: Options) -> Tokens:
    """-w p"""
    return -inputs["weights"] * p


def importance_sampling(p: Tokens, inputs: Inputs, options: Options) -> Tokens:
    """-r A"""
    return -_ratio(p, inputs) * inputs["advantages"]


def ppo(p: Tokens, inputs: Inputs, options: Options) -> Tokens:
    """-min(r A, clip(r, low, high) A)"""
    ratio, advantages = _ratio(p, inputs), inputs["advantages"]
    return -jnp.minimum(ratio * advantages, _clipped(ratio, options) * advantages)


def cispo(p: Tokens, inputs: Inputs, options: Options) -> Tokens:
    """-sg(clip(r, low, high)) p A"""
    ratio = jax.lax.stop_gradient(_clipped(_ratio(p, inputs), options))
    return -ratio * p * inputs["advantages"]


def dro(p: Tokens, inputs: Inputs, options: Options) -> Tokens:
    """-(p A - beta (p - q)^2 / 2)"""
    penalty = 0.5 * options["beta"] * (p - inputs["logprobs"]) ** 2
    return -(p * inputs["advantages"] - penalty)


def gspo(p: Tokens, inputs: Inputs, options: Options) -> Tokens:
    """-min(s A, clip(s, low, high) A), where s is the geometric mean of r over the masked tokens.

    At each token s has the gradient of that token's log-probability alone.
    """
    is_counted = inputs["sequence_ratio_mask"] != 0
    fixed = jax.lax.stop_gradient(p)
    total = jnp.sum(jnp.where(is_counted, fixed - inputs["logprobs"], 0.0), axis=-1, keepdims=True)
    mean = total / jnp.maximum(jnp.sum(is_counted, axis=-1, keepdims=True), 1)
    ratio, advantages = jnp.exp(mean + p - fixed), inputs["advantages"]
    return -jnp.minimum(ratio * advantages, _clipped(ratio, options) * advantages)


def _ratio(p, inputs):
    return jnp.exp(p - inputs["logprobs"])


def _clipped(ratio, options):
    return jnp.clip(ratio, options["clip_low_threshold"], options["clip_high_threshold"])


_OF_POLICY = ("logprobs", "advantages")
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, ("weights",), {}, optional=("weights",)),
    "importance_sampling": Loss(importance_sampling, _OF_POLICY, {}),
    "ppo": Loss(ppo, _OF_POLICY, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": Loss(cispo, _OF_POLICY, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": Loss(dro, _OF_POLICY, {"beta": 0.05}),
    "gspo": Loss(
        gspo,
        (*_OF_POLICY, "sequence_ratio_mask"),
        {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
    ),
}
