"""A KL from the reference as part of each token's reward, with a fixed or adaptive coefficient.

An algorithm with such a reward extends `KLReward` with its `Options`, and takes `first_state` and
`next_state` from here. One that compares the rewards of responses has `less_kl` around its
`advantages`: the sum of the KL over its tokens is subtracted from the reward of a response or turn.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.algorithm import Needs, Passes, check_options
from semrl_jax.algorithms.groups import is_last
from semrl_jax.algorithms.kl import penalised_rewards, update_kl_coefficient
from semrl_jax.algorithms.objective import Objective
from semrl_jax.support.choices import KL_ESTIMATORS
from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class KLReward(Objective):
    """A KL in the reward excludes one in the loss."""

    kl_reward_coefficient: float = setting(
        0.0, "KL in the reward; above 0, loss.kl_coefficient must be 0", at_least=0
    )
    kl_reward_estimator: str = setting("kl", "as loss.kl_estimator", choices=KL_ESTIMATORS)
    kl_target: float = setting(
        0.0, "wanted KL of an adaptive coefficient; 0: fixed", "nats per token", at_least=0
    )
    kl_horizon: int = setting(
        10_000, "number over which an adaptive coefficient changes by a fifth", "responses", above=0
    )

    def __post_init__(self):
        super().__post_init__()
        coefficient = self.kl_reward_coefficient
        check_options(
            self,
            kl_coefficient=(
                not (coefficient and self.kl_coefficient),
                f"be 0 with kl_reward_coefficient={coefficient}: the KL would count twice",
            ),
            kl_target=(
                self.kl_target == 0 or coefficient != 0,
                "be 0 if kl_reward_coefficient is 0: there is nothing to adapt",
            ),
        )

    def needs(self) -> Needs:
        needs = super().needs()._replace(state=self.kl_target > 0)
        names = ("reference", "early_reference", "old_logprobs", "early_old_logprobs")
        return needs._replace(**dict.fromkeys(names, True)) if self.kl_reward_coefficient else needs


def token_rewards(
    rewards: Float[Array, "P G *tokens"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: KLReward,
    state: dict[str, Float[Array, ""]] | None = None,
) -> Float[Array, "B T"]:
    """The reward at the last token, or those of turns in place, less coefficient * KL per token."""
    mask = response_mask
    if rewards.ndim == 2:
        at_tokens = jnp.where(is_last(mask), rewards.astype(jnp.float32).reshape(-1, 1), 0.0)
    else:
        at_tokens = rewards.reshape(mask.shape)
    if not options.kl_reward_coefficient:
        return at_tokens
    coefficient = options.kl_reward_coefficient if state is None else state["kl_coefficient"]
    penalised, _ = _penalised(at_tokens, passes, mask, options, coefficient)
    return penalised


def less_kl(advantages: Callable[..., Array]) -> Callable[..., Float[Array, "B T"]]:
    """Subtracts coefficient * KL from the rewards that `advantages` gets."""

    @functools.wraps(advantages)
    def found(
        rewards: Float[Array, "P G *tokens"],
        passes: Passes,
        response_mask: Bool[Array, "B T"],
        options: KLReward,
        state: dict[str, Float[Array, ""]] | None = None,
    ) -> Float[Array, "B T"]:
        if options.kl_reward_coefficient:
            at_tokens = token_rewards(rewards, passes, response_mask, options, state)
            left = at_tokens.reshape(*rewards.shape[:2], -1)
            rewards = jnp.sum(left, axis=2) if rewards.ndim == 2 else left
        return advantages(rewards, passes, response_mask, options)

    return found


def first_state(options: KLReward) -> dict[str, float]:
    return {"kl_coefficient": options.kl_reward_coefficient}


def next_state(
    state: dict[str, Float[Array, ""]],
    rewards: Float[Array, "P G"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: KLReward,
) -> dict[str, Any]:
    """The coefficient of the next step; see `update_kl_coefficient`."""
    zeros = jnp.zeros(response_mask.shape)
    _, kl = _penalised(zeros, passes, response_mask, options, 0.0)
    coefficient = update_kl_coefficient(
        state["kl_coefficient"],
        kl,
        target=options.kl_target,
        # A batch above the horizon changes the coefficient by a fifth, too.
        horizon=max(options.kl_horizon, rewards.size),
        num_responses=rewards.size,
    )
    return {"kl_coefficient": coefficient}


def _penalised(rewards, passes, response_mask, options, coefficient):
    return penalised_rewards(
        rewards,
        passes.old_logprobs,
        passes.ref_logprobs,
        response_mask,
        coefficient=coefficient,
        estimator=options.kl_reward_estimator,
    )
