"""The baseline of a group is a quantile of its rewards, the median by default.

A = (r - q) / (std + epsilon), q the smallest reward with a share of at least `quantile` at or
below it; the deviation only with `normalise`

With rewards 0 and 1 and a share p of correct responses, only the correct ones count where p <= 1 -
quantile, and only the wrong ones elsewhere.

Source: arXiv:2509.22611, Eqs. 3 and 4, quantile 0.4. Its code interpolates between rewards; the
equations, and this module, do not. Without `normalise` and at 0.5: the median baseline of
arXiv:2601.22582, which divides by the mean absolute deviation; that is often 0 for such rewards.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.algorithm import Passes
from semrl_jax.algorithms.groups import broadcast_to_tokens, centred
from semrl_jax.algorithms.objective import Objective, loss, token_weights
from semrl_jax.algorithms.objective import group_needs as needs
from semrl_jax.support.fields import setting

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]


@dataclasses.dataclass(frozen=True)
class Options(Objective):
    """Own options; see `Objective` for the others."""

    quantile: float = setting(
        0.5, "which quantile of a group's rewards is the baseline", within="(0, 1)"
    )
    normalise: bool = setting(True, "divide by the standard deviation")
    epsilon: float = setting(1e-6, "keeps a quotient finite", above=0)


def advantages(
    rewards: Float[Array, "P G"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
) -> Float[Array, "B T"]:
    ordered = jnp.sort(rewards, axis=1)
    index = max(math.ceil(options.quantile * rewards.shape[1]) - 1, 0)
    differences = centred(rewards, ordered[:, index : index + 1])
    if options.normalise:
        std = jnp.std(centred(rewards), axis=1, keepdims=True, ddof=1)
        differences = differences / (std + options.epsilon)
    return broadcast_to_tokens(differences, response_mask)
