"""RED-Weight: responses of high reward weigh more, by the exponential of their advantage.

A = a exp(a / weight_temperature), a = r - mean

The paper uses `surrogate="reinforce"`: no ratio, no bounds.

Source: arXiv:2509.24203 and its code in Trinity-RFT, temperature 1; the weights are not normalised.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from semrl_jax.algorithms.groups import centred
from semrl_jax.algorithms.objective import Objective, loss, token_weights
from semrl_jax.algorithms.objective import group_needs as needs
from semrl_jax.algorithms.turn_credit import each_turn
from semrl_jax.support.fields import setting

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]

MAX_EXPONENT = 20.0


@dataclasses.dataclass(frozen=True)
class Options(Objective):
    """Own options; see `Objective` for the others."""

    weight_temperature: float = setting(
        1.0, "advantage by which a weight grows e-fold", "reward", above=0
    )


@each_turn
def advantages(rewards, lengths, options):
    differences = centred(rewards, lengths)
    # Kept in the range of float32, also when it is squared.
    exponent = jnp.minimum(differences / options.weight_temperature, MAX_EXPONENT)
    return differences * jnp.exp(exponent)
