"""GRPO: rewards normalised within the group.

A = (r - mean) / (std + epsilon), mean and sample standard deviation over the group

Source: arXiv:2402.03300, Sec. 4.1.
"""

from __future__ import annotations

import dataclasses

from semrl_jax.algorithms.algorithm import check_options
from semrl_jax.algorithms.groups import broadcast_to_tokens, group_relative_advantages
from semrl_jax.algorithms.objective import Objective, loss, token_weights

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]


@dataclasses.dataclass(frozen=True)
class Options(Objective):
    """`epsilon` keeps the quotient finite; same unit as the rewards."""

    epsilon: float = 1e-6

    def __post_init__(self):
        super().__post_init__()
        check_options(self, epsilon=(self.epsilon > 0, "be above 0"))


def needs(options):
    return options.needs()._replace(groups=True)


def advantages(rewards, passes, response_mask, options):
    """See `group_relative_advantages`."""
    estimates = group_relative_advantages(rewards, epsilon=options.epsilon)
    return broadcast_to_tokens(estimates, response_mask)
