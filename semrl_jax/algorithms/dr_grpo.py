"""Dr. GRPO: rewards less the mean of the group, without the deviation.

A = r - mean

With `aggregation="constant_length"` neither easy and hard problems nor short and long responses
are weighted differently.

Source: arXiv:2503.20783.
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
    return broadcast_to_tokens(centred(rewards), response_mask)
