"""Who computes which numbers of a batch: a pass before the update, or the update itself."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import ml_collections

from semrl_jax.algorithms.algorithm import Algorithm, Passes
from semrl_jax.algorithms.credit import CreditRules, Options
from semrl_jax.settings.algorithms import TOKEN_LEVELS, importance_options
from semrl_jax.shaping import ShapingOptions

NONE, PASS, UPDATE = "none", "pass", "update"


class PassNeeds(NamedTuple):
    """What a step needs of the policy's own pass before its update, or of the reference's.

    `docs/extending.md` lists the places that a new field needs.

    Attributes:
      logprobs: of the policy before the update. The update gives them after it, without a pass, if
        a step has one update.
      entropies, states: of the policy before the update.
      reference_states: final states of the reference.
    """

    logprobs: bool = False
    entropies: bool = False
    states: bool = False
    reference_states: bool = False

    def __or__(self, other: PassNeeds) -> PassNeeds:
        return PassNeeds(*(a or b for a, b in zip(self, other, strict=True)))


NOTHING = PassNeeds()


@dataclasses.dataclass(frozen=True)
class PassPlan:
    """The passes of a run, decided once when it is set up.

    Attributes:
      old: who computes `old_logprobs`: NONE, a PASS before the update, or the UPDATE in its own
        forward pass, which has the same parameters if a step has one update.
      reference: who computes `ref_logprobs`: NONE, a PASS before the update, or the UPDATE.
      values: whether a critic gives values.
      states: whether the policy's own states are measured in every step.
      importance: options of `importance_weights`; empty: no correction.
      corrects: who multiplies the advantages by these weights: NONE, PASS: `assign_credit` from the
        log-probabilities of a pass, or the UPDATE.
      several_updates: whether a step has several updates. The later ones do not have its first
        parameters.
      warmup_steps: first steps, in which only the critic is trained.
    """

    old: str
    reference: str
    values: bool
    states: bool
    importance: Options
    corrects: str
    several_updates: bool
    warmup_steps: int

    @classmethod
    def of(cls, algorithm: Algorithm, config: ml_collections.ConfigDict) -> PassPlan:
        """The plan of a checked config."""
        needs = algorithm.needs
        importance = importance_options(config)
        several = config.data.prompts_per_step > config.training.prompts_per_minibatch
        # A single update corrects by itself, token by token.
        early_weights = several or importance["level"] not in ("none", *TOKEN_LEVELS)
        old = UPDATE if needs.old_logprobs else NONE
        if (
            needs.early_old_logprobs
            or (needs.old_logprobs and several)
            or (importance["level"] != "none" and early_weights)
        ):
            old = PASS
        reference = UPDATE if needs.reference else NONE
        # An offloaded reference has a pass of its own: it is not on the device during the update.
        is_away = needs.reference and "reference" in config.training.offload
        if needs.early_reference or is_away:
            reference = PASS
        corrects = PASS if old == PASS else UPDATE
        return cls(
            old=old,
            reference=reference,
            values=needs.values,
            states=config.hidden_states.source == "policy",
            importance=() if importance["level"] == "none" else tuple(importance.items()),
            corrects=NONE if importance["level"] == "none" else corrects,
            several_updates=several,
            warmup_steps=config.critic.warmup_steps if needs.values else 0,
        )

    @property
    def has_pass(self) -> bool:
        """Whether every step has a pass of the policy before its update."""
        return self.old == PASS or self.states

    def trains_policy(self, step: int) -> bool:
        return step >= self.warmup_steps

    def needs(self, step: int, asked: PassNeeds) -> PassNeeds:
        """What the passes before the update of a step have to give.

        Args:
          asked: what is needed in addition to the plan, for the log.
        """
        wanted = asked.logprobs or self.old == UPDATE
        given_later = self.trains_policy(step) and not self.several_updates
        logprobs = self.old == PASS or (wanted and not given_later)
        return asked._replace(logprobs=logprobs, states=asked.states or self.states)

    def given(self, passes: Passes) -> Passes:
        """The results of passes that the losses take; the update computes what it lacks."""
        return Passes(
            passes.old_logprobs if self.old == PASS else None,
            passes.ref_logprobs,
            passes.values,
        )


def credit_rules(
    algorithm: Algorithm, config: ml_collections.ConfigDict, plan: PassPlan
) -> CreditRules:
    """How a run assigns credit."""
    return CreditRules(
        algorithm,
        ShapingOptions(**config.shaping),
        config.algorithms.batch_rules.mask_truncated,
        plan.importance if plan.corrects == PASS else (),
    )
