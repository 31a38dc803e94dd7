"""AsymRE: REINFORCE with the mean of the group, shifted, as the baseline; for stale samples.

A = r - (mean + baseline_shift)

A negative shift makes the gradient of correct responses larger than the gradient of wrong ones,
which keeps training on old samples stable. The paper uses `surrogate="reinforce"`.

Source: arXiv:2506.20520, Sec. 5.2, shift -0.1 for rewards 0 and 1.
"""

from __future__ import annotations

import dataclasses

from semrl_jax.algorithms.groups import centred
from semrl_jax.algorithms.objective import Objective, loss, token_weights
from semrl_jax.algorithms.objective import group_needs as needs
from semrl_jax.algorithms.turn_credit import each_turn
from semrl_jax.support.fields import setting

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]


@dataclasses.dataclass(frozen=True)
class Options(Objective):
    """Own options; see `Objective` for the others."""

    baseline_shift: float = setting(-0.1, "added to the baseline")


@each_turn
def advantages(rewards, lengths, options):
    return centred(rewards, lengths) - options.baseline_shift
