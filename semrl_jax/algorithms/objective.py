"""The objective that the built-in algorithms share: a surrogate, a KL, an entropy bonus.

An algorithm module takes `token_weights`, `loss` and mostly `needs` from here. Its `Options` are
`Objective`, extended by those of its own advantages.
"""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms import losses
from semrl_jax.algorithms.algorithm import Needs, check_options
from semrl_jax.algorithms.given import GIVEN_SURROGATES
from semrl_jax.algorithms.surrogates import SURROGATES, Bounds
from semrl_jax.algorithms.turn_credit import TurnCredit
from semrl_jax.support.choices import OBJECTIVE_KL
from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Objective(Bounds, losses.Aggregation, TurnCredit):
    """Settings of the objective, see `losses.policy_loss`, and of credit."""

    surrogate: str = setting(
        "clip", "Loss of a token: clip, gspo, dcpo, cispo, reinforce, opmd, rec or real"
    )
    kl_coefficient: float = setting(
        0.001, "weight of the KL penalty; 0: no reference is loaded", at_least=0
    )
    entropy_coefficient: float = setting(0.001, "weight of the entropy bonus", at_least=0)
    kl_estimator: str = setting(
        "low_var_kl",
        "KL from the sampled token: kl, abs, mse, low_var_kl or low_var_kl+; exact: over the "
        "vocabulary",
        choices=OBJECTIVE_KL,
    )
    given_surrogate: str = setting(
        "luffy", "Loss of a token of a given response: luffy, rl_plus or sft"
    )
    given_coefficient: float = setting(1.0, "weight of the loss of given responses", at_least=0)

    def __post_init__(self):
        high = self.clip_epsilon_high
        length = self.constant_length
        check_options(
            self,
            clip_epsilon_high=(
                # CISPO may have no lower bound, and any upper one.
                high == 0 or high >= self.clip_epsilon or (high > 0 and self.surrogate == "cispo"),
                f"be at least clip_epsilon={self.clip_epsilon}, or 0 for the same value",
            ),
            dual_clip=(self.dual_clip == 0 or self.dual_clip > 1, "be above 1, or 0 for none"),
            surrogate=(self.surrogate in SURROGATES, f"be one of {', '.join(SURROGATES)}"),
            given_surrogate=(
                self.given_surrogate in GIVEN_SURROGATES,
                f"be one of {', '.join(GIVEN_SURROGATES)}",
            ),
            constant_length=(
                length > 0 if self.aggregation == "constant_length" else length == 0,
                "be the limit of a response in tokens with aggregation='constant_length', and 0 "
                "with any other",
            ),
        )

    def needs(self) -> Needs:
        """What the loss needs: the reference only with a KL."""
        chosen, of_given = SURROGATES[self.surrogate], GIVEN_SURROGATES[self.given_surrogate]
        return Needs(
            old_logprobs=chosen.old_logprobs or of_given.old_logprobs,
            reference=self.kl_coefficient != 0,
            exact_kl=self.kl_coefficient != 0 and self.kl_estimator == "exact",
            sequence_ids=chosen.sequence_ids,
            turn_rewards=self.credit == "turn",
            given=True,
            given_apart=of_given.is_apart,
        )


@dataclasses.dataclass(frozen=True)
class WholeResponses(Objective):
    """Settings of an algorithm that takes rewards of whole responses."""

    def __post_init__(self):
        super().__post_init__()
        way_out = "be 'episode': the algorithm takes the reward of a whole response"
        check_options(self, credit=(self.credit == "episode", way_out))


def group_needs(options: Objective) -> Needs:
    """What the loss needs, and groups: `needs` of an algorithm that compares responses."""
    return options.needs()._replace(groups=True)


def token_weights(response_mask: Bool[Array, "B T"], options: Objective) -> Float[Array, "B T"]:
    return losses.token_weights(
        response_mask, aggregation=options.aggregation, constant_length=options.constant_length
    )


def loss(
    logprobs: Float[Array, "*tokens"],
    entropy: Float[Array, "*tokens"],
    *,
    options: Objective,
    **arrays: Array | None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """`policy_loss` of a micro-batch, with its arrays."""
    return losses.policy_loss(
        logprobs,
        entropy,
        **arrays,
        surrogate=options.surrogate,
        bounds=options,
        kl_coefficient=options.kl_coefficient,
        entropy_coefficient=options.entropy_coefficient,
        kl_estimator=options.kl_estimator,
        given_surrogate=options.given_surrogate,
        given_coefficient=options.given_coefficient,
    )
