"""ScaleRL: all groups whose rewards differ weigh the same; one deviation for the whole batch.

A = n / (P' n_p) (r - mean) / (std + 1e-6), std over the r - mean of the P' groups whose rewards
differ; n_p tokens of the group, n of the batch

With `aggregation="token_mean"` and one update per step, the loss is the mean over these P' groups
of the means over their tokens, as if the other groups were not in the batch. A is 0 if no group
differs. The rest of the recipe are settings: `surrogate="cispo"`, `clip_epsilon=1`,
`clip_epsilon_high=3`, `kl_coefficient=0`, `entropy_coefficient=0`, `rollout.max_staleness` and
`data.curriculum="window:low=0:high=0.89:outside=0"`, which never returns to what is solved.

Source: arXiv:2510.13786, Sec. 4, with ratios up to 4 and batches up to 8 updates old.

Forced ends of long thoughts are left out. n and n_p count responses that `mask_truncated` leaves
out later. The curve fit is `launch.analyze curve`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.algorithm import Passes
from semrl_jax.algorithms.groups import centred
from semrl_jax.algorithms.objective import Objective as Options
from semrl_jax.algorithms.objective import group_needs as needs
from semrl_jax.algorithms.objective import loss, token_weights
from semrl_jax.algorithms.turn_credit import by_turn

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]


def advantages(
    rewards: Float[Array, "P G *tokens"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
) -> Float[Array, "B T"]:
    found = by_turn(_normalised, rewards, response_mask, passes.spans)
    num_groups = rewards.shape[0]
    of_group = response_mask.reshape(num_groups, -1)
    tokens = jnp.sum(of_group, axis=1, dtype=jnp.float32)  # [P]
    differs = jnp.any(found.reshape(num_groups, -1) != 0, axis=1)
    share = jnp.sum(tokens) / (jnp.maximum(jnp.sum(differs), 1) * jnp.maximum(tokens, 1.0))
    return found * jnp.repeat(share, rewards.shape[1])[:, None]


def _normalised(rewards, lengths):
    differences = centred(rewards, lengths)
    present = jnp.ones(rewards.shape) if lengths is None else (lengths > 0).astype(jnp.float32)
    counted = jnp.where(jnp.any(differences != 0, axis=1, keepdims=True), present, 0.0)
    # Each group of differences has the mean 0, so the batch has it too.
    std = jnp.sqrt(jnp.sum(differences**2) / jnp.maximum(jnp.sum(counted), 1.0))
    return differences / (std + 1e-6)
