"""RLOO: the baseline of a response is the mean reward of the others in its group.

A_i = r_i - mean of r_j over j != i = (r_i - mean) G / (G - 1)

Source: arXiv:2402.14740.
"""

from __future__ import annotations

import dataclasses

from semrl_jax.algorithms.groups import broadcast_to_tokens, centred
from semrl_jax.algorithms.objective import Objective, loss, token_weights

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]


@dataclasses.dataclass(frozen=True)
class Options(Objective):
    """Those of the objective."""


def needs(options):
    return options.needs()._replace(groups=True)


def advantages(rewards, passes, response_mask, options):
    size = rewards.shape[1]
    return broadcast_to_tokens(centred(rewards) * size / (size - 1), response_mask)
