"""SPO: the baseline of a prompt is the mean of its earlier rewards; no group is needed.

A_t = (a - mean) / sqrt(variance + 1e-8), a = r - v, mean and variance over all tokens of the batch

v = S / W, from the visits of the prompt before this step: at each visit, S and W are multiplied by
prompt_memory, and the rewards and their number are added. Before the first visit, v is the mean
reward of the batch. The first visit has at least the weight 1 / (1 - prompt_memory), which W has
after many visits with one response.

Source: arXiv:2509.13232; arXiv:2608.24870 (SPO++), the variance over tokens.

In the first, the factor is between 0.875 and 0.96, by how far the policy has moved since the last
visit, and first values come from responses before training. MSSR (arXiv:2512.18215) adds the
entropy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.algorithm import Needs, Passes
from semrl_jax.algorithms.gae import whiten
from semrl_jax.algorithms.groups import broadcast_to_tokens
from semrl_jax.algorithms.objective import WholeResponses, loss, token_weights
from semrl_jax.support.fields import setting

__all__ = [
    "Options", "advantages", "first_state", "loss", "needs", "next_state", "token_weights",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options(WholeResponses):
    """Own options; see `Objective` for the others."""

    prompt_memory: float = setting(0.9, "weight of a prompt's earlier rewards", within="[0, 1)")


def needs(options: Options) -> Needs:
    return options.needs()._replace(prompt_state=True)


def first_state(options: Options) -> dict[str, float]:
    """The weighted sum of the rewards of a prompt, and the sum of the weights."""
    return {"rewards": 0.0, "weights": 0.0}


def next_state(
    state: dict[str, Float[Array, " P"]],
    rewards: Float[Array, "P G"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
) -> dict[str, Float[Array, " P"]]:
    kept = options.prompt_memory
    is_first, size = state["weights"] == 0, rewards.shape[1]
    # A first visit counts as much as all later ones together.
    scale = jnp.where(is_first, jnp.maximum(1 / (1 - kept) / size, 1.0), 1.0)
    total = jnp.sum(rewards.astype(jnp.float32), axis=1)
    return {
        "rewards": kept * state["rewards"] + scale * total,
        "weights": kept * state["weights"] + scale * size,
    }


def advantages(
    rewards: Float[Array, "P G"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
    state: dict[str, Any],
) -> Float[Array, "B T"]:
    rewards = rewards.astype(jnp.float32)
    known = state["rewards"] / jnp.maximum(state["weights"], 1.0)
    baseline = jnp.where(state["weights"] > 0, known, jnp.mean(rewards))
    found = broadcast_to_tokens(rewards - baseline[:, None], response_mask)
    return jax.lax.stop_gradient(whiten(found, response_mask))
