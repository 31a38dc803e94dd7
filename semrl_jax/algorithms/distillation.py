"""On-policy distillation: a token counts by how much more probable a teacher finds it.

x_t = ref_logprobs - old_logprobs, the reference being the teacher of `model.reference_path`

A_t = w (sum over k >= t of d^(k - t) x_k) + reward_weight (r - mean) / (std + 1e-6), over the
tokens of the response; w is `teacher_weight`, d is `teacher_discount`

Without discount, the gradient is that of KL(policy || teacher) at each token, from the one token
that was sampled. `teacher_weight=0`, `kl_estimator="exact"` and `kl_coefficient=1` take it from the
whole vocabulary instead.

With `data.teacher_input`, the teacher reads the reference answer in its prompt. It is then the
policy at the start (OPSD), or with `teacher="policy"` the policy before each update (SDPO's kind).

Source: Thinking Machines Lab, "On-Policy Distillation", 2025, for discount 0; arXiv:2306.08543,
Eq. 2, for 1; arXiv:2601.18734 (OPSD) and 2601.20802 (SDPO), the loss of the sampled token. SDPO's
teacher reads feedback and a correct response of the group, and is an average over updates.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.algorithm import Needs, Passes, check_options
from semrl_jax.algorithms.gae import generalized_advantages
from semrl_jax.algorithms.groups import group_relative_advantages
from semrl_jax.algorithms.objective import Objective, loss, token_weights
from semrl_jax.algorithms.turn_credit import by_turn
from semrl_jax.support.choices import TEACHERS
from semrl_jax.support.fields import setting

__all__ = ["Options", "advantages", "loss", "needs", "token_weights"]


@dataclasses.dataclass(frozen=True)
class Options(Objective):
    """Own options; see `Objective` for the others."""

    teacher: str = setting(
        "reference",
        "reference: another model teaches; policy: the policy itself, which reads "
        "data.teacher_input",
        choices=TEACHERS,
    )
    teacher_weight: float = setting(1.0, "weight of the teacher", at_least=0)
    teacher_discount: float = setting(0.0, "weight of the next token's x; 0: none", within="[0, 1]")
    reward_weight: float = setting(0.0, "weight of GRPO's advantage; 0: none", at_least=0)

    def __post_init__(self):
        super().__post_init__()
        of_policy = self.teacher == "policy"
        check_options(
            self,
            kl_coefficient=(
                not (of_policy and self.kl_coefficient),
                "be 0 with teacher='policy', which takes the place of the reference",
            ),
            teacher_weight=(
                not (self.teacher_weight and self.kl_coefficient and self.kl_estimator == "exact"),
                f"be 0 with kl_estimator='exact' and kl_coefficient={self.kl_coefficient}: the "
                "teacher would count twice",
            ),
        )


def needs(options: Options) -> Needs:
    found = options.needs()._replace(groups=options.reward_weight > 0)
    names = ["old_logprobs", "early_old_logprobs"]
    names += ["reference", "early_reference"] if options.teacher == "reference" else ["own_teacher"]
    return found._replace(**dict.fromkeys(names, True)) if options.teacher_weight else found


def advantages(
    rewards: Float[Array, "P G *tokens"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
) -> Float[Array, "B T"]:
    found = jnp.zeros(response_mask.shape)
    if options.teacher_weight:
        compared = passes.ref_logprobs - passes.old_logprobs
        later, _ = generalized_advantages(
            compared, jnp.zeros_like(compared), response_mask, gamma=options.teacher_discount
        )
        found = options.teacher_weight * later
    if options.reward_weight:
        found += options.reward_weight * by_turn(_of_rewards, rewards, response_mask, passes.spans)
    return jax.lax.stop_gradient(found)


def _of_rewards(rewards, lengths):
    return group_relative_advantages(rewards, lengths=lengths)
