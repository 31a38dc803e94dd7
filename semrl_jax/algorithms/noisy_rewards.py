"""Noisy rewards: corrects a verifier that errs at known rates.

A_i = R_i - mean of R_j over j != i, R = (a - false_positive_rate) / (1 - false_positive_rate -
false_negative_rate), with `correction="backward"`

A = a - 1 + false_negative_rate, with `correction="forward"`

a is 1 if r > threshold (accepted), else 0. "backward": R has the mean of the true reward, so the
gradient is unbiased. With rewards of one verifier only, the correction is a constant factor.
"forward": A has the mean 0 if the response is correct and -(1 - false_positive_rate -
false_negative_rate) if it is wrong. It is unbiased up to this factor, and needs no group.

Source: arXiv:2510.00915, Eq. 3 and App. B, with scales s_BC = s_FC = 1; rates there 0.1 and 0.2.

A division by the deviation of the group would undo the correction (B.4).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from semrl_jax.algorithms.algorithm import Needs, check_options
from semrl_jax.algorithms.groups import by_size, centred, per_other
from semrl_jax.algorithms.objective import Objective, loss, token_weights
from semrl_jax.algorithms.turn_credit import each_turn
from semrl_jax.support.fields import setting

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]


@dataclasses.dataclass(frozen=True)
class Options(Objective):
    """Own options; see `Objective` for the others."""

    correction: str = setting("backward", "backward or forward", choices=("backward", "forward"))
    false_positive_rate: float = setting(0.0, "share of wrong responses that are accepted")
    false_negative_rate: float = setting(0.0, "share of correct responses that are rejected")
    threshold: float = setting(0.0, "rewards above are positive")

    def __post_init__(self):
        super().__post_init__()
        fp, fn = self.false_positive_rate, self.false_negative_rate
        check_options(
            self,
            false_positive_rate=(
                0 <= fp < 1 and (fp == 0 or self.correction == "backward"),
                "be in [0, 1), and 0 with correction='forward', which does not use it",
            ),
            false_negative_rate=(
                0 <= fn < 1 - fp,
                f"be at least 0 and below {1 - fp:g}, which is 1 - false_positive_rate: a verifier "
                "with more errors tells nothing about the response",
            ),
        )


def needs(options: Options) -> Needs:
    groups = options.correction == "backward"
    return options.needs()._replace(groups=groups, plain_rewards=True)


@each_turn
def advantages(rewards, lengths, options):
    fp, fn = options.false_positive_rate, options.false_negative_rate
    accepted = (rewards > options.threshold).astype(jnp.float32)
    if options.correction == "forward":
        return accepted - 1 + fn
    corrected = (accepted - fp) / (1 - fp - fn)
    return centred(corrected, lengths) * by_size(
        lambda size: size * per_other(size), rewards, lengths
    )
