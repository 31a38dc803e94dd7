"""GRPO (arXiv:2402.03300, Sec. 4.1): group-relative advantages; clipped surrogate, KL, entropy."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.algorithm import Needs, Passes, check_options
from semrl_jax.algorithms.groups import broadcast_to_tokens, group_relative_advantages
from semrl_jax.algorithms.losses import AGGREGATIONS, policy_loss
from semrl_jax.algorithms.losses import token_weights as weights_of
from semrl_jax.choices import KL_ESTIMATORS


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of GRPO, see the functions that take them; ValueError for a value out of range."""

    epsilon: float = 1e-6
    clip_epsilon: float = 0.2
    kl_coefficient: float = 0.001
    entropy_coefficient: float = 0.001
    kl_estimator: str = "low_var_kl"
    aggregation: str = "token_mean"

    def __post_init__(self):
        check_options(
            self,
            epsilon=(self.epsilon > 0, "be above 0"),
            clip_epsilon=(0 < self.clip_epsilon < 1, "be in (0, 1)"),
            kl_coefficient=(self.kl_coefficient >= 0, "be at least 0"),
            entropy_coefficient=(self.entropy_coefficient >= 0, "be at least 0"),
            kl_estimator=(self.kl_estimator in KL_ESTIMATORS, f"be one of {KL_ESTIMATORS}"),
            aggregation=(self.aggregation in AGGREGATIONS, f"be one of {AGGREGATIONS}"),
        )


def needs(options: Options) -> Needs:
    """Groups, and the reference only if the loss has a KL term."""
    return Needs(groups=True, old_logprobs=True, reference=options.kl_coefficient != 0)


def token_weights(response_mask: Bool[Array, "B T"], options: Options) -> Float[Array, "B T"]:
    return weights_of(response_mask, aggregation=options.aggregation)


def advantages(
    rewards: Float[Array, "P G"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
) -> Float[Array, "B T"]:
    """The same for all tokens of a response; see `group_relative_advantages`."""
    estimates = group_relative_advantages(rewards, epsilon=options.epsilon).reshape(-1)
    return broadcast_to_tokens(estimates, response_mask)


def loss(
    logprobs: Float[Array, "*tokens"],
    entropy: Float[Array, "*tokens"],
    *,
    options: Options,
    **arrays: Float[Array, "*tokens"] | None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """`policy_loss` of a micro-batch, with its arrays."""
    return policy_loss(
        logprobs,
        entropy,
        **arrays,
        clip_epsilon=options.clip_epsilon,
        kl_coefficient=options.kl_coefficient,
        entropy_coefficient=options.entropy_coefficient,
        kl_estimator=options.kl_estimator,
    )
