"""REINFORCE with a running baseline: rewards less the mean reward of the steps before.

A = r - b,  b = sum_k c^k m_k / sum_k c^k, c = 1 - baseline_rate, m_k the mean reward k steps ago

b is 0 at the first step. With `credit="turn"`, r is the return of a turn, and m_k still the mean
reward of episodes.

Source: Williams 1992; the moving average over steps as in arXiv:2402.14740, Sec. 2.2, there with
equal weights (baseline_rate 0).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.algorithm import Needs, Passes
from semrl_jax.algorithms.objective import Objective, loss, token_weights
from semrl_jax.algorithms.turn_credit import each_turn
from semrl_jax.support.fields import setting

__all__ = [
    "Options", "advantages", "first_state", "loss", "needs", "next_state", "token_weights",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options(Objective):
    """Own options; see `Objective` for the others."""

    baseline_rate: float = setting(
        0.1, "update rate of the baseline; 0: equal weights of all steps", within="[0, 1)"
    )


def needs(options: Options) -> Needs:
    return options.needs()._replace(state=True)


def first_state(options: Options) -> dict[str, float]:
    """The weighted sum of mean rewards, and the sum of the weights."""
    return {"rewards": 0.0, "weights": 0.0}


def next_state(
    state: dict[str, Float[Array, ""]],
    rewards: Float[Array, "P G"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
) -> dict[str, Float[Array, ""]]:
    kept = 1.0 - options.baseline_rate
    return {
        "rewards": kept * state["rewards"] + jnp.mean(rewards.astype(jnp.float32)),
        "weights": kept * state["weights"] + 1.0,
    }


@each_turn
def advantages(rewards, lengths, options, state):
    return rewards.astype(jnp.float32) - state["rewards"] / jnp.maximum(state["weights"], 1.0)
