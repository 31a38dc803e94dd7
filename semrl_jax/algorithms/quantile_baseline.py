"""The baseline of a group is a quantile of its rewards, the median by default.

A = (r - q) / (std + epsilon), q the smallest reward with a share of at least `quantile` at or
below it; the deviation only with `normalise`

With rewards 0 and 1 and a share p of correct responses, only the correct ones count where p <= 1 -
quantile, else only the wrong ones.

Source: arXiv:2509.22611, Eqs. 3 and 4, quantile 0.4; arXiv:2601.22582, the median, which
is `quantile=0.5` with `normalise=False`.

The code of the first interpolates between rewards; its equations, and this module, do not. The
second divides by the mean absolute deviation, which is often 0 for such rewards.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from semrl_jax.algorithms.groups import by_size, centred, group_mean, per_other
from semrl_jax.algorithms.objective import Objective, loss, token_weights
from semrl_jax.algorithms.objective import group_needs as needs
from semrl_jax.algorithms.turn_credit import each_turn
from semrl_jax.support.fields import setting

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]


@dataclasses.dataclass(frozen=True)
class Options(Objective):
    """Own options; see `Objective` for the others."""

    quantile: float = setting(
        0.5, "quantile of a group's rewards that is the baseline", within="(0, 1)"
    )
    normalise: bool = setting(True, "divide by the deviation")
    epsilon: float = setting(1e-6, "keeps a quotient finite", above=0)


@each_turn
def advantages(rewards, lengths, options):
    def place(size):
        # Rounded: 0.28 * 25 is 7.000000000000001.
        return max(math.ceil(round(options.quantile * size, 9)) - 1, 0)

    present = rewards if lengths is None else jnp.where(lengths > 0, rewards, jnp.inf)
    index = jnp.reshape(by_size(place, rewards, lengths), (-1, 1))
    baseline = jnp.take_along_axis(jnp.sort(present, axis=1), index, axis=1)
    differences = centred(rewards, lengths, baseline=baseline)
    if options.normalise:
        deviations = centred(rewards, lengths)
        deviations -= group_mean(deviations, lengths)  # it differs from 0 by rounding
        total = jnp.sum(deviations**2, axis=1, keepdims=True)
        std = jnp.sqrt(total * by_size(per_other, rewards, lengths))
        differences = differences / (std + options.epsilon)
    return differences
