"""Who computes which numbers of a batch: a pass before the update, or the update itself."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import ml_collections

from semrl_jax.algorithms.algorithm import Algorithm, Passes
from semrl_jax.algorithms.credit import CreditRules, Options
from semrl_jax.settings.algorithms import TOKEN_LEVELS, importance_options
from semrl_jax.settings.training import updates_per_step
from semrl_jax.shaping import ShapingOptions

NONE, PASS, UPDATE = "none", "pass", "update"


class PassNeeds(NamedTuple):
    """What a step needs of passes before its update; docs/extending.md says what a field needs."""

    # The first three are of the policy before the update. With one update per step, the update
    # itself returns the log-probabilities, so a probe's `after` has them without a pass.
    logprobs: bool = False
    entropies: bool = False
    states: bool = False
    reference_states: bool = False  # final states of the reference

    def __or__(self, other: PassNeeds) -> PassNeeds:
        return PassNeeds(*(a or b for a, b in zip(self, other, strict=True)))


NOTHING = PassNeeds()


@dataclasses.dataclass(frozen=True)
class PassPlan:
    """The passes of a run, decided once when it is set up."""

    # Who computes `old_logprobs`: NONE, a PASS before the update, or the UPDATE in its own forward
    # pass, which has the same parameters if a step has one update.
    old: str
    reference: str  # who computes `ref_logprobs`: NONE, a PASS before the update, or the UPDATE
    # Whether `ref_logprobs` come from a PASS of the policy itself under the teacher's prompts.
    own_teacher: bool
    values: bool  # whether a critic gives values
    states: bool  # whether the policy's own states are measured in every step
    importance: Options  # options of `importance_weights`; empty: no correction
    # Who multiplies the advantages by these weights: NONE, PASS: `assign_credit` from the
    # log-probabilities of a pass, or the UPDATE.
    corrects: str
    # Whether an update may see others than the log-probabilities before the step: later updates
    # have other parameters, and adapters may have dropout.
    update_differs: bool
    warmup_steps: int  # first steps, in which only the critic is trained

    @classmethod
    def of(cls, algorithm: Algorithm, config: ml_collections.ConfigDict) -> PassPlan:
        """The plan of a checked config."""
        needs = algorithm.needs
        importance = importance_options(config)
        level = importance["level"]
        differs = updates_per_step(config) > 1 or config.lora.dropout > 0
        # A single update corrects by itself, token by token.
        early_weights = level != "none" and (differs or level not in TOKEN_LEVELS)
        needs_pass = needs.early_old_logprobs or (needs.old_logprobs and differs) or early_weights
        old = PASS if needs_pass else UPDATE if needs.old_logprobs else NONE
        # An offloaded reference has a pass of its own: it is not on the device during the update.
        is_away = needs.reference and "reference" in config.training.offload
        reference = UPDATE if needs.reference else NONE
        # The update reads the policy's prompts, and takes one reference, which is here.
        model = config.model
        in_pass = config.data.teacher_input or model.references or model.reference_addresses
        if needs.early_reference or is_away or (needs.reference and in_pass):
            reference = PASS
        corrects = PASS if old == PASS else UPDATE
        return cls(
            old=old,
            reference=reference,
            own_teacher=needs.own_teacher,
            values=needs.values,
            states=config.hidden_states.source == "policy",
            importance=() if level == "none" else tuple(importance.items()),
            corrects=NONE if level == "none" else corrects,
            update_differs=differs,
            warmup_steps=config.critic.warmup_steps if needs.values else 0,
        )

    @property
    def has_pass(self) -> bool:
        """Whether every step has a pass of the policy before its update."""
        return self.old == PASS or self.states

    def needs(self, step: int, asked: PassNeeds) -> PassNeeds:
        """What the passes before the update of a step have to give; `asked` is for the log."""
        wanted = asked.logprobs or self.old == UPDATE
        given_later = step >= self.warmup_steps and not self.update_differs
        logprobs = self.old == PASS or (wanted and not given_later)
        return asked._replace(logprobs=logprobs, states=asked.states or self.states)

    def given(self, passes: Passes) -> Passes:
        """The results of passes that the losses take; the update computes what it lacks."""
        return passes if self.old == PASS else passes._replace(old_logprobs=None)


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
