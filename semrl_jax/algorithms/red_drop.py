"""RED-Drop: drops wrong responses until a group has no more of them than of correct ones.

A = r - m for the kept responses, 0 for the others; m is the mean reward of those kept

A response counts as wrong if its reward is below the mean of the group. If there
are more of these than of the others, the first in the order of the group are kept. The paper uses
`surrogate="reinforce"`.

Source: arXiv:2509.24203 and its code in Trinity-RFT.

Its code draws the dropped responses; here the order of the group decides, in which the responses
are independent draws, so a run can be repeated.
"""

from __future__ import annotations

import jax.numpy as jnp

from semrl_jax.algorithms.groups import centred, group_mean
from semrl_jax.algorithms.objective import Objective as Options
from semrl_jax.algorithms.objective import group_needs as needs
from semrl_jax.algorithms.objective import loss, token_weights
from semrl_jax.algorithms.turn_credit import each_turn

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]


@each_turn
def advantages(rewards, lengths, options):
    differences = centred(rewards, lengths)
    present = jnp.ones(rewards.shape, bool) if lengths is None else lengths > 0
    wrong = present & (differences < 0)
    num_others = jnp.sum(present & ~wrong, axis=1, keepdims=True)
    kept = present & (~wrong | (jnp.cumsum(wrong, axis=1) <= num_others))
    kept_lengths = kept.astype(jnp.float32)
    return jnp.where(kept, differences - group_mean(differences, kept_lengths), 0.0)
